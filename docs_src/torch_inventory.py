"""An inventory of what these pages link to in PyTorch's documentation.

Sphinx would fetch the full one from the network; this one is made here instead.
"""

import zlib
from operator import attrgetter
from pathlib import Path

import torch.utils.data
from torch import fx, nn  # noqa: F401

URL = "https://docs.pytorch.org/docs/stable/"
# next to all modules of torch.nn: what has a page of its own, or is on another one
OTHERS = {
    "torch.Tensor": ("class", "tensors.html"),
    "torch.Generator": ("class", "generated/torch.Generator.html"),
    "torch.dtype": ("class", "tensor_attributes.html"),
    "torch.device": ("class", "tensor_attributes.html"),
    "torch.Size": ("class", "size.html"),
    "torch.Tensor.to": ("method", "generated/torch.Tensor.to.html"),
    "torch.compile": ("function", "generated/torch.compile.html"),
    "torch.autograd.graph.GradientEdge": ("class", "autograd.html"),
    "torch.autograd.graph.Node": ("class", "autograd.html"),
    "torch.fx.GraphModule": ("class", "fx.html"),
    "torch.fx.Node": ("class", "fx.html"),
    "torch.fx.Proxy": ("class", "fx.html"),
    "torch.nn.Parameter": ("class", "generated/torch.nn.parameter.Parameter.html"),
    "torch.utils.data.DataLoader": ("class", "data.html"),
    "torch.utils.data.Dataset": ("class", "data.html"),
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
    # by the module that defines it, as annotations name it; or by its name alone
    for name, (role, page) in list(entries.items()):
        if role == "class":
            item = attrgetter(name.partition(".")[2])(torch)
            entries[f"{item.__module__}.{item.__qualname__}"] = role, page
    for name in (
        "torch.Tensor",
        "torch.nn.Module",
        "torch.autograd.graph.GradientEdge",
    ):
        entries[name.rpartition(".")[2]] = entries[name]
    content = "".join(
        f"{name} py:{role} 1 {page}#$ -\n" for name, (role, page) in entries.items()
    )
    header = "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: stable\n"
    header += "# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(header.encode() + zlib.compress(content.encode()))
