"""An inventory of what these pages link to in PyTorch's documentation.

Sphinx would fetch the full one from the network; this one is made here instead.
"""

import zlib
from pathlib import Path

from torch import nn

URL = "https://docs.pytorch.org/docs/stable/"
# next to all modules of torch.nn: what has a page of its own, or is on another one
OTHERS = {
    "torch.Tensor": ("class", "tensors.html"),
    "torch.Generator": ("class", "generated/torch.Generator.html"),
    "torch.dtype": ("class", "tensor_attributes.html"),
    "torch.device": ("class", "tensor_attributes.html"),
    "torch.fx.GraphModule": ("class", "fx.html"),
    "torch.gru": ("function", "generated/torch.nn.GRU.html"),
    "torch.nn.functional.pad": ("function", "generated/torch.nn.functional.pad.html"),
}


def write(path: Path) -> None:
    """Write the inventory in Sphinx's format.

    Args:
        path: The file.
    """
    entries = dict(OTHERS)
    for name, member in vars(nn).items():
        if isinstance(member, type) and issubclass(member, nn.Module):
            entries[f"torch.nn.{name}"] = ("class", f"generated/torch.nn.{name}.html")
    content = "".join(
        f"{name} py:{role} 1 {page}#$ -\n" for name, (role, page) in entries.items()
    )
    header = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: stable\n"
    header += "# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(header.encode() + zlib.compress(content.encode()))
