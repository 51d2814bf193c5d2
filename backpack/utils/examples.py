"""What the examples need: MNIST, and the GGN by plain automatic differentiation.

A thousand MNIST images travel with the package. The full training set is read from a
folder with the IDX files as published (compressed with gzip, or not), that is named by
the argument ``folder`` or by the environment variable ``BACKPACK_MNIST``.
"""

import gzip
from math import prod
from os import environ
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from torch import Tensor, cat, float32, frombuffer, int64, stack, uint8, zeros_like
from torch.nn import Module
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, TensorDataset

from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list

MNIST_FOLDER_VARIABLE = "BACKPACK_MNIST"
PACKAGED_MNIST = Path(__file__).parents[1] / "data" / "mnist"
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081


def _read_idx(folder: Path, name: str) -> Tensor:
    """Read an IDX file of bytes.

    Args:
        folder: Folder that holds the file.
        name: Name of the file. It may have the ending ``.gz``, too.

    Returns:
        Content as tensor of type ``uint8``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no IDX file of bytes, or not complete.
    """
    plain, compressed = folder / name, folder / f"{name}.gz"
    if plain.is_file():
        content = plain.read_bytes()
    elif compressed.is_file():
        content = gzip.decompress(compressed.read_bytes())
    else:
        expected = " and ".join(f"{file}[.gz]" for file in MNIST_FILES)
        raise FileNotFoundError(
            f"Expected the MNIST files {expected} in the folder '{folder}', but found "
            f"no {name}[.gz]. Put the IDX files as published there, name another "
            f"folder (argument `folder` or environment variable "
            f"{MNIST_FOLDER_VARIABLE}), or name none to use the packaged images."
        )
    # two zero bytes, type (8: unsigned byte), number of axes, then their lengths
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"Expected an IDX file of bytes: '{folder / name}[.gz]'.")
    start = 4 + 4 * content[3]
    lengths = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) - start != prod(lengths):
        raise ValueError(
            f"Expected {prod(lengths)} bytes of shape {lengths}, got "
            f"{len(content) - start}: '{folder / name}[.gz]' is damaged."
        )
    return frombuffer(bytearray(content[start:]), dtype=uint8).reshape(lengths)


def load_mnist_dataset(folder: Optional[str] = None) -> Dataset:
    """Load MNIST training images, normalized, with their labels.

    Args:
        folder: Folder with the published IDX files of the training set. Defaults to
            the environment variable ``BACKPACK_MNIST``. If neither is given, the
            thousand packaged images are loaded.

    Returns:
        Dataset whose items are an image ``[1, 28, 28]``, with the pixels of the
        training set shifted and scaled to mean 0 and deviation 1, and a label.
    """
    path = Path(folder or environ.get(MNIST_FOLDER_VARIABLE) or PACKAGED_MNIST)
    images, labels = (_read_idx(path, name) for name in MNIST_FILES)
    pixels = images.unsqueeze(1).to(float32) / 255
    return TensorDataset((pixels - MNIST_MEAN) / MNIST_DEVIATION, labels.to(int64))


def get_mnist_dataloader(
    batch_size: int = 64, shuffle: bool = True, folder: Optional[str] = None
) -> DataLoader:
    """Return a loader of MNIST mini-batches.

    Args:
        batch_size: Number N of images in a mini-batch.
        shuffle: Whether to shuffle the images.
        folder: Folder of the full training set, see :func:`load_mnist_dataset`.

    Returns:
        Loader of images ``[N, 1, 28, 28]`` and labels ``[N]``.
    """
    dataset = load_mnist_dataset(folder)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(
    batch_size: int = 64,
    shuffle: bool = True,
    flat: bool = False,
    folder: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Load one mini-batch of MNIST images.

    Args:
        batch_size: Number N of images.
        shuffle: Whether to draw the images at random, or to take the first ones.
        flat: Whether to flatten the images.
        folder: Folder of the full training set, see :func:`load_mnist_dataset`.

    Returns:
        Images ``[N, 1, 28, 28]``, or ``[N, 784]`` if ``flat``, and labels ``[N]``.

    Raises:
        ValueError: If there are fewer than ``batch_size`` images.
    """
    loader = get_mnist_dataloader(batch_size, shuffle, folder)
    available = len(loader.dataset)  # type: ignore[arg-type]
    if batch_size > available:
        raise ValueError(
            f"Expected batch_size to be at most {available}, the number of images, got "
            f"{batch_size}. Name a folder with the full data set (argument `folder` or "
            f"environment variable {MNIST_FOLDER_VARIABLE}) for larger batches."
        )
    X, y = next(iter(loader))
    return (X.flatten(start_dim=1) if flat else X), y


def autograd_diag_ggn_exact(
    X: Tensor,
    y: Tensor,
    model: Module,
    loss_function: Module,
    idx: Optional[List[int]] = None,
) -> Tensor:
    """Compute the diagonal of the GGN by plain automatic differentiation.

    Slow and obvious, to compare with.

    Args:
        X: Inputs ``[N, *]`` of the model.
        y: Targets.
        model: Model with D elements of trainable parameters.
        loss_function: Loss function of the model's output and the targets.
        idx: Indices of the diagonal's elements to compute. ``None`` means all.

    Returns:
        Diagonal ``[D]``, or its elements ``[len(idx)]``, in the order of ``idx``.
    """
    columns = _autograd_ggn_exact_columns(X, y, model, loss_function, idx=idx)
    return stack([column[i] for i, column in columns])


def _autograd_ggn_exact_columns(
    X: Tensor,
    y: Tensor,
    model: Module,
    loss_function: Module,
    idx: Optional[List[int]] = None,
) -> Iterator[Tuple[int, Tensor]]:
    """Compute columns of the GGN by plain automatic differentiation.

    Args:
        X: Inputs ``[N, *]`` of the model.
        y: Targets.
        model: Model with D elements of trainable parameters. Some may not enter the
            output.
        loss_function: Loss function of the model's output and the targets.
        idx: Indices of the columns to compute. ``None`` means all.

    Yields:
        Index of a column, and the column ``[D]``.
    """
    parameters = [param for param in model.parameters() if param.requires_grad]
    vector = parameters_to_vector(parameters).detach()
    output = model(X)
    loss = loss_function(output, y)
    for i in range(len(vector)) if idx is None else idx:
        unit = zeros_like(vector)
        unit[i] = 1
        v = vector_to_parameter_list(unit, parameters)
        column = ggn_vector_product(loss, output, model, v)
        yield i, cat([entry.flatten() for entry in column])
