"""Train with several processes, and curvature of the whole batch in each of them.

``DistributedDataParallel`` gives each process a part of the batch, and averages the
gradients. Other quantities stay those of the part: a diagonal of the generalized
Gauss-Newton matrix (GGN) from 32 of 64 images is a different one in each process, and
if it scales the update, the networks drift apart.

``backpack.distributed.reduce`` is called after the backward pass, and leaves in each
process what a single one would have computed from all images. You learn where the call
goes, and see that nothing else changes. Each process makes a step with the diagonal,

    p  <-  p - lr * grad / (diag_ggn + damping)

and prints the variance of individual gradients, which needs all images, too. At the end
the parameters agree among processes, and with a training without any of this.

Start it with ``torchrun --nproc-per-node 2 examples/example_distributed.py``, or
without ``torchrun``, and it does so itself.
"""

import os
import subprocess
import sys
from typing import List, Optional, Tuple

import torch
from torch import Tensor, distributed
from torch.nn import CrossEntropyLoss, Linear, Module, Sequential, Sigmoid
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.distributed import reduce
from backpack.extensions import DiagGGNExact, Variance
from backpack.utils.examples import load_one_batch_mnist


def make_model() -> Module:
    """Make the network, with the same parameters each time.

    Returns:
        A network for vectors ``[N, 784]`` with ten outputs, extended.
    """
    torch.manual_seed(0)
    model = Sequential(Linear(784, 16), Sigmoid(), Linear(16, 10)).double()
    return extend(model)


def train(X: Tensor, y: Tensor, shared: bool, steps: int = 5) -> Tuple[Tensor, float]:
    """Train the network on a batch, or on this process' part of it.

    Args:
        X: Images ``[N, 784]``.
        y: Labels ``[N]``.
        shared: Whether the other processes have the rest of the batch.
        steps: Number of steps. Default: 5.

    Returns:
        All parameters as a vector, and the mean variance of individual gradients.
    """
    model, lossfunc = make_model(), extend(CrossEntropyLoss())
    extensions = DiagGGNExact(), Variance()
    predict = DistributedDataParallel(model) if shared else model
    for _ in range(steps):
        model.zero_grad()
        with backpack(*extensions):
            lossfunc(predict(X), y).backward()
        if shared:
            reduce(model.parameters(), extensions)
        with torch.no_grad():
            for p in model.parameters():
                p.addcdiv_(p.grad, p.diag_ggn_exact + 0.1, value=-0.1)
    variance = parameters_to_vector([p.variance for p in model.parameters()])
    return parameters_to_vector(model.parameters()).detach(), variance.mean().item()


def work() -> None:
    """Train in one of several processes, and compare with the others."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    X, y = load_one_batch_mnist(batch_size=32 * world, shuffle=False, flat=True)
    X = X.double()

    own = slice(32 * rank, 32 * (rank + 1))
    parameters, variance = train(X[own], y[own], shared=True)
    print(f"Process {rank} of {world}: mean variance {variance:.6e}", flush=True)

    from_all: List[Optional[Tensor]] = [None] * world
    distributed.all_gather_object(from_all, parameters)
    for others in from_all:
        assert torch.equal(others, parameters)
    expected, expected_variance = train(X, y, shared=False)
    assert_close(parameters, expected)
    assert_close(variance, expected_variance)
    distributed.barrier()
    if rank == 0:
        print("All processes have the parameters of a training by one process")
    distributed.destroy_process_group()


def start(processes: int = 2) -> None:
    """Start several processes that run this script.

    Args:
        processes: How many. Default: 2.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(processes), __file__]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    print(result.stdout, end="")


if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    else:
        start()
