"""What users write passes a strict type checker; the package itself: ``make mypy``."""

from pathlib import Path

import pytest

# Parts of torch that what users write does not need, and that take most of the time
SKIPPED = (
    "_decomp _dynamo _export _functorch _higher_order_ops _inductor _library _prims"
)
SKIPPED += " _refs _subclasses ao cuda distributed distributions export fx.experimental"
SKIPPED += " mtia nested onnx optim package profiler quantization sparse testing xpu"
SKIPPED += " utils.data utils._sympy"


@pytest.mark.slow
def test_calls_of_the_documentation(tmp_path: Path) -> None:
    """``typed_use.py`` has no error, except where it says that there is one."""
    api = pytest.importorskip("mypy.api")
    skipped = ",".join(f"torch.{name}.*" for name in SKIPPED.split())
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        f"[mypy-{skipped},sympy.*,numpy.*]\nfollow_imports = skip\n"
    )
    file = str(Path(__file__).with_name("typed_use.py"))
    options = [f"--config-file={config}", f"--cache-dir={tmp_path / 'cache'}"]
    out, problems, code = api.run([*options, file])
    assert code == 0, out + problems
