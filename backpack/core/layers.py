"""Layers that exist for programs written before PyTorch had them."""

from torch.nn import Flatten

__all__ = ["Flatten"]
