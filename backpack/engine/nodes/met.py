"""What is refused after samples have met, and why."""

from __future__ import annotations

from backpack.core.layout import Mixed
from backpack.utils.hooks import name_module

MET = (
    "{what}: samples have met in {operation}, so that quantities of individual samples "
    "are not defined for {names}. The batch axis is axis 0 of the model's inputs, and "
    "of each tensor in a list. Let each sample be computed by itself, along other axes "
    "(pad samples that are tensors in a list, or rows that a mask alone keeps apart "
    "outside of `scaled_dot_product_attention`), "
)
BATCH_NORM = "normalize by running averages (`.eval()`, or `training=False`), "
OTHERWISE = (
    "detach what only keeps numbers in range (`x - x.max().detach()`), or compute this "
    "part of the loss in a backward pass outside of the context."
)
AS_DATA = "or mix them before the model is called: the mixed rows are the samples then."
ANOTHER_INPUT = (
    " Here what the first input enters meets another input, as long as that one: if "
    "all samples share it, give it an axis of length 1 in front."
)
LOST = (
    "{what}: it is not known where the samples are after {operation}, so that "
    "quantities of individual samples can't be computed for {names}. Replace this "
    "operation by others of PyTorch (what `torch.compile` has made of a loss, by the "
    "loss itself), extend the model as a whole if only parts of it are, or freeze the "
    "parameters. Let a sample enter each row, if only by `+ 0 * input`."
)


def refuse(what: str, met: Mixed, names: str) -> None:
    """Refuse what comes after samples have met.

    Args:
        what: Who asks.
        met: Where they have met.
        names: Names of what is not defined.

    Raises:
        NotImplementedError: Always.
    """
    module = None if met.module is None else met.module()
    where = "" if module is None else f" of {name_module(module)}"
    text = (MET if met.is_known else LOST).format(
        what=what, operation=met.operation + where, names=names
    )
    if met.is_known:
        text += BATCH_NORM if "batch_norm" in met.operation else ""
        text += AS_DATA if met.is_data else OTHERWISE
        text += ANOTHER_INPUT if met.is_of_inputs else ""
    raise NotImplementedError(text)
