"""The networks that are measured, with random data of the right shape.

3C3D and All-CNN-C are the CIFAR networks of the DeepOBS benchmark suite (Schneider et
al., ICLR 2019), with CIFAR-10 and CIFAR-100 as their problems.
"""

from typing import Callable, Dict, NamedTuple, Tuple

from torch import Tensor, manual_seed, rand, randint
from torch.nn import (
    AvgPool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
    ZeroPad2d,
)


def mlp() -> Sequential:
    """Make the fully connected network 784-512-256-10.

    Returns:
        A network for inputs of shape ``[N, 784]``.
    """
    return Sequential(
        Linear(784, 512), ReLU(), Linear(512, 256), ReLU(), Linear(256, 10)
    )


def net_3c3d() -> Sequential:
    """Make 3C3D: three convolutions, three dense layers.

    Its pooling keeps ``ceil(size / 2)`` positions. What that pads is a zero row and a
    zero column, which a maximum of non-negative numbers does not see.

    Returns:
        A network for inputs of shape ``[N, 3, 32, 32]``.
    """

    def pool() -> Tuple[Module, Module]:
        return ZeroPad2d((0, 1, 0, 1)), MaxPool2d(3, stride=2)

    return Sequential(
        *(Conv2d(3, 64, 5), ReLU(), *pool()),
        *(Conv2d(64, 96, 3), ReLU(), *pool()),
        *(Conv2d(96, 128, 3, padding=1), ReLU(), *pool()),
        *(Flatten(), Linear(1152, 512), ReLU(), Linear(512, 256), ReLU()),
        Linear(256, 10),
    )


def all_cnn_c() -> Sequential:
    """Make All-CNN-C (Springenberg et al., 2015): nine convolutions, no dense layer.

    Returns:
        A network for inputs of shape ``[N, 3, 32, 32]``.
    """
    return Sequential(
        Dropout(0.2),
        *(Conv2d(3, 96, 3, padding=1), ReLU()),
        *(Conv2d(96, 96, 3, padding=1), ReLU()),
        *(Conv2d(96, 96, 3, padding=1, stride=2), ReLU()),
        Dropout(0.5),
        *(Conv2d(96, 192, 3, padding=1), ReLU()),
        *(Conv2d(192, 192, 3, padding=1), ReLU()),
        *(Conv2d(192, 192, 3, padding=1, stride=2), ReLU()),
        Dropout(0.5),
        *(Conv2d(192, 192, 3), ReLU()),
        *(Conv2d(192, 192, 1), ReLU()),
        *(Conv2d(192, 100, 1), ReLU()),
        *(AvgPool2d(6), Flatten()),
    )


class Problem(NamedTuple):
    """A network with the shape of its data.

    Args:
        title: What reports call it.
        make: Makes the network.
        num_params: Number of its parameters.
        input_shape: Shape of one sample.
        num_classes: Number of classes.
        batch_size: Number of samples that are measured by default.
    """

    title: str
    make: Callable[[], Sequential]
    num_params: int
    input_shape: Tuple[int, ...]
    num_classes: int
    batch_size: int

    def data(self, batch_size: int, device: str) -> Tuple[Tensor, Tensor]:
        """Draw a batch.

        Args:
            batch_size: Number of samples N.
            device: Where the tensors go.

        Returns:
            Inputs ``[N, *input_shape]`` and labels ``[N]``.
        """
        manual_seed(0)
        inputs = rand(batch_size, *self.input_shape)
        labels = randint(self.num_classes, (batch_size,))
        return inputs.to(device), labels.to(device)

    def model(self, device: str) -> Sequential:
        """Make the network, with the same initial parameters each time.

        Args:
            device: Where the parameters go.

        Returns:
            The network, in training mode.

        Raises:
            RuntimeError: If the number of parameters is not the published one.
        """
        manual_seed(1)
        model = self.make().to(device)
        num_params = sum(p.numel() for p in model.parameters())
        if num_params != self.num_params:
            raise RuntimeError(
                f"{self.title} has {num_params} parameters, expected {self.num_params}."
            )
        return model


PROBLEMS: Dict[str, Problem] = {
    "mlp": Problem("MLP 784-512-256-10", mlp, 535_818, (784,), 10, 128),
    "3c3d": Problem("3C3D", net_3c3d, 895_210, (3, 32, 32), 10, 32),
    "allcnnc": Problem("All-CNN-C", all_cnn_c, 1_387_108, (3, 32, 32), 100, 8),
}
