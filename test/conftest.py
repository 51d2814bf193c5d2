"""What holds for every test: one thread, and random numbers that repeat."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random numbers."""
    torch.manual_seed(0)
