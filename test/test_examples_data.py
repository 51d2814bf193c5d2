"""Tests of ``backpack.utils.examples``: the packaged MNIST images, and the GGN."""

import gzip
from pathlib import Path
from typing import List, Optional, Tuple

import pytest
import torch
from torch import Tensor, float64, rand, randint, testing
from torch.autograd import grad
from torch.nn import CrossEntropyLoss, Linear, Module, Sequential, Sigmoid

from backpack.utils import examples


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch) -> None:
    """Forget a folder that the user's environment names.

    Args:
        monkeypatch: Restores the environment.
    """
    monkeypatch.delenv(examples.MNIST_FOLDER_VARIABLE, raising=False)


def write_idx(path: Path, content: Tensor) -> None:
    """Write bytes as IDX file.

    Args:
        path: File; compressed with gzip if it ends in ``.gz``.
        content: Tensor of type ``uint8``.
    """
    lengths = b"".join(size.to_bytes(4, "big") for size in content.shape)
    data = b"\x00\x00\x08" + bytes([content.ndim]) + lengths
    data += bytes(content.flatten().tolist())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, suffix: str = "") -> Tuple[Tensor, Tensor]:
    """Write a data set of five images as IDX files.

    Args:
        folder: Folder to write to.
        suffix: Ending of the files.

    Returns:
        Images ``[5, 28, 28]`` and labels ``[5]``, as bytes.
    """
    images = randint(256, (5, 28, 28), dtype=torch.uint8)
    labels = torch.arange(5, dtype=torch.uint8)
    for name, content in zip(examples.MNIST_FILES, (images, labels)):
        write_idx(folder / f"{name}{suffix}", content)
    return images, labels


@pytest.mark.usefixtures("cpu")
def test_packaged_images() -> None:
    """A thousand images come with the package: hundred of each digit, normalized."""
    images, labels = examples.load_mnist_dataset().tensors
    assert images.shape == (1000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [100] * 10
    # as far as the statistics of some images are those of all
    assert images.mean().abs() < 0.05
    assert abs(images.std() - 1) < 0.05
    pixels = images * 0.3081 + 0.1307
    testing.assert_close(pixels.amin(), torch.tensor(0.0), atol=1e-6, rtol=0)
    testing.assert_close(pixels.amax(), torch.tensor(1.0))


def test_packaged_images_show_digits() -> None:
    """Images and labels belong together: the nearest class mean tells most digits."""
    images, labels = examples.load_mnist_dataset().tensors
    images = images.flatten(start_dim=1)
    means = torch.stack([images[:500][labels[:500] == d].mean(0) for d in range(10)])
    predictions = torch.cdist(images[500:], means).argmin(1)
    assert (predictions == labels[500:]).double().mean() > 0.7


@pytest.mark.parametrize("flat, shape", [(False, (1, 28, 28)), (True, (784,))])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_load_one_batch(batch_size: int, flat: bool, shape: Tuple[int, ...]) -> None:
    """A batch has the requested form, and holds the first images in order."""
    X, y = examples.load_one_batch_mnist(batch_size, shuffle=False, flat=flat)
    assert X.shape == (batch_size, *shape)
    images, labels = examples.load_mnist_dataset().tensors
    assert torch.equal(X.flatten(), images[:batch_size].flatten())
    assert torch.equal(y, labels[:batch_size])


@pytest.mark.usefixtures("cpu")
def test_batches_are_drawn_at_random() -> None:
    """Shuffled batches follow the seed."""
    batches = []
    for seed in 0, 0, 1:
        torch.manual_seed(seed)
        batches.append(examples.load_one_batch_mnist()[1])
    assert batches[0].shape == (64,)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


@pytest.mark.usefixtures("cpu")
def test_batch_that_is_too_large() -> None:
    """More images than there are cannot be loaded."""
    assert len(examples.load_one_batch_mnist(1000)[1]) == 1000
    with pytest.raises(ValueError, match="at most 1000.*BACKPACK_MNIST"):
        examples.load_one_batch_mnist(1001)


@pytest.mark.usefixtures("cpu")
def test_dataloader_serves_all_images() -> None:
    """An epoch goes through all images once."""
    loader = examples.get_mnist_dataloader(batch_size=300)
    labels = [y for X, y in loader]
    assert [len(y) for y in labels] == [300, 300, 300, 100]
    assert torch.cat(labels).bincount().tolist() == [100] * 10


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("by_variable", [True, False])
@pytest.mark.usefixtures("cpu")
def test_folder_of_the_user(
    tmp_path: Path, monkeypatch, by_variable: bool, suffix: str
) -> None:
    """The published files are read from a folder, named in either way."""
    images, labels = write_mnist(tmp_path, suffix)
    folder: Optional[str] = str(tmp_path)
    if by_variable:
        monkeypatch.setenv(examples.MNIST_FOLDER_VARIABLE, folder)
        folder = None
    X, y = examples.load_one_batch_mnist(5, shuffle=False, folder=folder)
    truth = (images.unsqueeze(1).double() / 255 - 0.1307) / 0.3081
    testing.assert_close(X.double(), truth, rtol=1e-5, atol=1e-6)
    assert torch.equal(y, labels.long())


def test_missing_files(tmp_path: Path) -> None:
    """The error lists what was expected, and where."""
    with pytest.raises(FileNotFoundError) as error:
        examples.load_mnist_dataset(folder=str(tmp_path))
    for text in *examples.MNIST_FILES, str(tmp_path), "BACKPACK_MNIST":
        assert text in str(error.value)


@pytest.mark.parametrize(
    "content, match",
    [(b"<html>", "IDX file"), (b"\x00\x00\x08\x01\x00\x00\x00\x03ab", "damaged")],
)
def test_damaged_files(tmp_path: Path, content: bytes, match: str) -> None:
    """Files that are something else, or cut off, are refused."""
    write_mnist(tmp_path)
    (tmp_path / examples.MNIST_FILES[1]).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        examples.load_mnist_dataset(folder=str(tmp_path))


class PartlyUsed(Module):
    """A model with parameters that do not enter its output."""

    def __init__(self) -> None:
        """Set up layers, one of which is not called."""
        super().__init__()
        self.unused = Linear(2, 2)
        self.layers = Sequential(Linear(3, 2), Sigmoid(), Linear(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all but the unused layer.

        Args:
            x: Input ``[N, 3]``.

        Returns:
            Output ``[N, 3]``.
        """
        return self.layers(x)


def dense_ggn(X: Tensor, model: Module) -> Tensor:
    """Compute the GGN of the mean cross-entropy, row by row and sample by sample.

    Args:
        X: Input ``[N, *]``.
        model: Model with D elements of trainable parameters.

    Returns:
        GGN ``[D, D]``.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    result = 0
    for output in model(X):
        rows = [
            grad(o, params, retain_graph=True, materialize_grads=True) for o in output
        ]
        J = torch.stack([torch.cat([r.flatten() for r in row]) for row in rows])
        p = output.softmax(0).detach()
        result = result + J.T @ (p.diag() - p.outer(p)) @ J / len(X)
    return result


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen"])
@pytest.mark.parametrize("idx", [None, [3, 0, 16], [-1]], ids=str)
def test_autograd_ggn(idx: Optional[List[int]], frozen: bool) -> None:
    """The GGN's columns and diagonal are right, with unused or frozen parameters."""
    torch.manual_seed(0)
    model = PartlyUsed().double()
    model.layers[0].weight.requires_grad_(not frozen)
    X, y = rand(4, 3, dtype=float64), randint(3, (4,))
    args = (X, y, model, CrossEntropyLoss())
    truth = dense_ggn(X, model)
    assert truth.diag().count_nonzero() == len(truth) - 6

    indices = list(range(len(truth))) if idx is None else idx
    result = examples.autograd_diag_ggn_exact(*args, idx=idx)
    testing.assert_close(result, truth.diag()[indices], rtol=1e-9, atol=1e-12)
    columns = list(examples._autograd_ggn_exact_columns(*args, idx=idx))
    assert [i for i, _ in columns] == indices
    for i, column in columns:
        testing.assert_close(column, truth[:, i], rtol=1e-9, atol=1e-12)
