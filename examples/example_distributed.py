"""
Several processes: curvature of the whole batch in each of them
===============================================================

``DistributedDataParallel`` gives each process a part of the batch, and averages the
gradients. Other quantities stay those of the part: a diagonal of the generalized
Gauss-Newton matrix (GGN) from half of the images is a different one in each process,
and if it scales the update, the networks drift apart. ``backpack.distributed.reduce``,
after the backward pass, leaves in each process what a single one would have computed.
"""

import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Tuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor, distributed
from torch.nn import CrossEntropyLoss, Linear, Sequential, Sigmoid
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.distributed import reduce
from backpack.extensions import DiagGGNExact, Variance
from backpack.utils.examples import load_one_batch_mnist

# %%
# Where the call goes
# -------------------
# Each process makes steps with gradient and diagonal, from its own images.


def train(
    X: Tensor, y: Tensor, shared: bool, reduced: bool, steps: int = 15
) -> Tuple[Tensor, Tensor]:
    """Return all parameters after each step, and the variance of the gradients."""
    torch.manual_seed(0)
    model = extend(Sequential(Linear(784, 16), Sigmoid(), Linear(16, 10)).double())
    predict = DistributedDataParallel(model) if shared else model
    params, lossfunc, history = list(model.parameters()), extend(CrossEntropyLoss()), []
    extensions = DiagGGNExact(), Variance()
    for _ in range(steps):
        model.zero_grad()
        with backpack(*extensions):
            lossfunc(predict(X), y).backward()
        if reduced:
            reduce(params, extensions)
        with torch.no_grad():
            for p in params:
                p.addcdiv_(p.grad, p.diag_ggn_exact + 0.1, value=-0.1)
        history.append(parameters_to_vector(params).detach())
    return torch.stack(history), parameters_to_vector(p.variance for p in params)


# %%
# Two processes
# -------------
# ``torchrun --nproc-per-node 2 script.py`` runs a script in two processes, and sets
# ``RANK`` in each. This script starts itself in that way, and each process leaves what
# it has found in a file, once with and once without ``reduce``.

X, y = load_one_batch_mnist(batch_size=64, shuffle=False, flat=True)
X = X.double()

if "RANK" in os.environ:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    own = slice(32 * rank, 32 * (rank + 1))
    found = [train(X[own], y[own], shared=True, reduced=r) for r in (True, False)]
    torch.save(found, os.path.join(os.environ["RESULTS"], f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
    sys.exit()

with TemporaryDirectory() as folder:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "RESULTS": folder}
    script = globals().get("__file__", "example_distributed.py")  # not in notebooks
    command = [*torchrun, "--nproc-per-node", "2", script]
    subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=True)
    first, second = (torch.load(os.path.join(folder, f"{r}.pt")) for r in range(2))

# %%
# Processes that drift apart
# --------------------------
# Without ``reduce``, gradients are averaged, but each process scales them with a
# diagonal of its own. With it, all parameters agree among processes, to the last bit.

expected, variance = train(X, y, shared=False, reduced=False)
fig, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for index, label in enumerate(["with reduce", "without reduce"]):
    distance = (first[index][0] - second[index][0]).norm(dim=1)
    ax.plot(range(1, len(distance) + 1), distance.tolist(), "o-", label=label)
    print(f"Distance of the processes' networks, {label}: {distance[-1]:.1e}")
ax.set(xlabel="step", ylabel="distance of two processes' parameters")
ax.legend()
ax.grid(alpha=0.3)
plt.show()

# %%
# Check
# -----
# Parameters, and the variance of individual gradients, which needs all images, too, are
# those of a training by one process.

assert torch.equal(first[0][0], second[0][0])
assert not torch.allclose(first[1][0], second[1][0])
assert_close(first[0][0], expected)
assert_close(first[0][1], variance)
print("All processes have the parameters of a training by one process.")
