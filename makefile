# Every task of development is a target here; `make help` lists them. Targets make
# their own environment when there is none, and reuse it afterwards.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS := requirements/constraints.txt
BIN := $(VENV)/bin
SOURCES := backpack test examples benchmarks docs_src setup.py
WORKERS ?= 2
BENCHMARK_ARGS ?=
PEERS_VENV := .venv-peers
MODELS_VENV := .venv-models
MODELS_ARGS ?=

# What an installed wheel has to do
WHEEL_VENV := $(VENV)-wheel
define SMOKE_TEST
import torch
from backpack import backpack, extend
from backpack.extensions import DiagGGNExact
from backpack.utils.examples import load_one_batch_mnist
X, y = load_one_batch_mnist(8, flat=True)
model, loss = extend(torch.nn.Linear(784, 10)), extend(torch.nn.CrossEntropyLoss())
with backpack(DiagGGNExact()):
    loss(model(X), y).backward()
assert model.weight.diag_ggn_exact.shape == (10, 784)
endef
export SMOKE_TEST

# The oldest versions that are promised. A python3.9 that runs, or else pyenv's.
OLDEST_VENV := $(VENV)-oldest
PYTHON_OLDEST ?= $(shell for python in python3.9 \
	"$$(pyenv root 2>/dev/null)"/versions/3.9.*/bin/python; do \
	"$$python" --version >/dev/null 2>&1 && echo "$$python" && break; done)

# One thread per test worker; the workers themselves use the cores.
PYTEST_IN = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg \
	$(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal
# A test that hangs fails by its name, and its worker is replaced
PYTEST = $(call PYTEST_IN,$(VENV)) -o faulthandler_exit_on_timeout=true
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet \
	--constraint $(CONSTRAINTS)

BLACK = $(BIN)/black --config black.toml
# Operations of the gallery are small: several threads would rather wait for each other
SPHINX = OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet \
	-d docs_src/_build/doctrees

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' \
		'/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' makefile

##@ Try it

.PHONY: demo
demo: install-dev ## Every quantity on MNIST, checked against autograd; writes a picture
	@MPLBACKEND=Agg $(BIN)/python examples/demo.py

.PHONY: examples
examples: install-dev ## Run every script in examples/
	@set -e; for script in examples/*.py; do \
		echo "== $$script"; MPLBACKEND=Agg $(BIN)/python "$$script"; done

##@ Test

.PHONY: test
test: install-dev ## The whole test suite (minutes, on two cores)
	$(PYTEST)

.PHONY: test-light
test-light: install-dev ## The quick loop: a part of every test's rows (under a minute)
	$(PYTEST) --light

.PHONY: test-oldest
test-oldest: $(OLDEST_VENV)/.installed ## The quick loop on the oldest PyTorch and Python
	$(call PYTEST_IN,$(OLDEST_VENV)) --light

.PHONY: test-long
test-long: install-dev ## The whole suite, with thousands of random inputs per property
	BACKPACK_TEST_LONG=1 $(PYTEST) -o faulthandler_timeout=0

.PHONY: test-models
test-models: $(MODELS_VENV)/.installed ## Models of transformers, timm, ...; updates docs_src/models.json
	$(call PYTEST_IN,$(MODELS_VENV)) test/stock_models --durations=10 $(MODELS_ARGS)

##@ Format

.PHONY: format-check
format-check: black-check isort-check flake8 pydocstyle mypy pyright ## All checks below

.PHONY: black
black: install-dev ## Format the code with black
	$(BLACK) --quiet $(SOURCES)

.PHONY: black-check
black-check: install-dev ## Check that black would change nothing
	$(BLACK) --check --diff --quiet $(SOURCES)

.PHONY: isort
isort: install-dev ## Sort the imports with isort
	$(BIN)/isort --quiet $(SOURCES)

.PHONY: isort-check
isort-check: install-dev ## Check that isort would change nothing
	$(BIN)/isort --check-only --diff $(SOURCES)

.PHONY: flake8
flake8: install-dev ## Look for mistakes with flake8 and bugbear
	$(BIN)/flake8 $(SOURCES)

.PHONY: pydocstyle
pydocstyle: install-dev ## Check the docstrings (Google style)
	$(BIN)/pydocstyle $(SOURCES)

.PHONY: mypy
mypy: install-dev ## Check the types of the package, and of the calls that pages show
	$(BIN)/mypy
	$(BIN)/mypy --config-file= --strict --follow-imports silent \
		--cache-dir .mypy_cache/use test/typed_use.py

.PHONY: pyright
pyright: install-dev ## The same calls, as editors see them
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

##@ Measure and document

.PHONY: benchmark
benchmark: install-dev ## Time and memory of every quantity; PEERS=1 adds other packages
ifeq ($(PEERS),1)
	$(MAKE) $(PEERS_VENV)/.installed
	$(BIN)/python benchmarks/run.py --peers $(PEERS_VENV)/bin/python $(BENCHMARK_ARGS)
else
	$(BIN)/python benchmarks/run.py $(BENCHMARK_ARGS)
endif

.PHONY: build-docs
build-docs: $(VENV)/.installed-docs ## Run the gallery, build the documentation, check it
	MPLBACKEND=Agg $(SPHINX) -b html docs_src docs_src/_build/html
	$(SPHINX) -b doctest -D plot_gallery=0 docs_src docs_src/_build/doctest
	$(BIN)/codespell README*.md CONTRIBUTING.md changelog.md examples docs_src backpack \
		--skip "*/_build,*/_generated,*/gallery,*/internals,*.svg,*.json,*.gz" \
		--ignore-words docs_src/spelling.txt
	@echo "Open docs_src/_build/html/index.html"

.PHONY: check-pages
check-pages: install-dev ## Look whether pages fit into phones and screens; needs chromium
	$(BIN)/python -m pytest test/test_pages.py

##@ Release

.PHONY: release-check
release-check: $(VENV)/.installed-release ## Build wheel and sources; test both, as they are
	rm -rf dist build $(WHEEL_VENV)
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint $(CONSTRAINTS) dist/*.whl
	cd dist && $(abspath $(WHEEL_VENV))/bin/python -c "$$SMOKE_TEST"
	mkdir -p build/sources
	tar -xzf dist/*.tar.gz -C build/sources --strip-components 1
	cd build/sources && PYTHONPATH=$$PWD $(call PYTEST_IN,$(abspath $(VENV))) --light

.PHONY: release
release: $(VENV)/.installed-release ## Upload what `make release-check` has built
	$(BIN)/python -m twine upload dist/*

##@ Install

.PHONY: install
install: ## Install the package with its two dependencies into the current environment
	$(PYTHON) -m pip install .

.PHONY: install-dev
install-dev: $(VENV)/.installed ## Make .venv, with pinned versions of all that is used

.PHONY: conda-env
conda-env: ## Make the conda environment "backpack" for development
	conda env create --file .conda_env.yml

.PHONY: clean
clean: ## Remove environments and everything that other targets wrote
	rm -rf .venv .venv-* build dist *.egg-info docs_src/_build docs_src/_generated \
		docs_src/gallery docs_src/internals docs_src/quantities examples/*.png \
		.mypy_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The files that follow mark a finished installation: make repeats it only when the
# metadata or the pinned versions change.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Development needs Python 3.11 or newer: make PYTHON=<python> ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml setup.py $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing pinned development versions into $(VENV)"
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable .[dev]
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable .[docs]
	@touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable .[release]
	@touch $@

$(OLDEST_VENV)/.installed: pyproject.toml setup.py requirements/oldest.txt
	@"$(PYTHON_OLDEST)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 9))' || \
		{ echo "This needs Python 3.9: make PYTHON_OLDEST=<python> ..."; exit 1; }
	@echo "Installing the oldest versions that are promised into $(OLDEST_VENV)"
	$(PYTHON_OLDEST) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint requirements/oldest.txt setuptools
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint requirements/oldest.txt --no-build-isolation --editable .[test]
	@touch $@

$(PEERS_VENV)/.installed: requirements/peers.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint $(CONSTRAINTS) torch numpy einops packaging scipy opt_einsum
	$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--no-deps --requirement requirements/peers.txt
	@touch $@

# torchvision registers operations for which this torch has no kernels, and fails; its
# models that are tested, and timm, use nothing that needs them.
$(MODELS_VENV)/.installed: requirements/models.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(MODELS_VENV)
	$(MODELS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint $(CONSTRAINTS) torch numpy einops packaging pillow \
		certifi idna click Jinja2 Pygments pytest pytest-xdist
	$(MODELS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
		--no-deps --requirement requirements/models.txt
	@for file in $(MODELS_VENV)/lib/python*/site-packages/torchvision/_meta_registrations.py; do \
		: > $$file; done
	@touch $@
