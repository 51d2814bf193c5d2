"""Options of the extensions that compute Kronecker factors."""

from typing import List


class _Options:
    """Strings with a name."""

    CHOICES: List[str] = []

    @classmethod
    def check_exists(cls, strategy: str) -> None:
        """Check that an option exists.

        Args:
            strategy: The option.

        Raises:
            AssertionError: If it does not.
        """
        if strategy not in cls.CHOICES:
            raise AssertionError(
                f"Unknown {cls.__name__} {strategy!r}. Choose one of {cls.CHOICES}."
            )


class LossHessianStrategy(_Options):
    """How the loss Hessian is represented where the backward pass starts."""

    EXACT = "exact"
    SAMPLING = "sampling"
    SUM = "sum"
    CHOICES = [EXACT, SAMPLING, SUM]


class BackpropStrategy(_Options):
    """What is pulled back: an average over the batch, or the columns of a factor."""

    BATCH_AVERAGE = "average"
    SQRT = "sqrt"
    CHOICES = [BATCH_AVERAGE, SQRT]

    @classmethod
    def is_batch_average(cls, strategy: str) -> bool:
        """Tell whether an average over the batch is pulled back.

        Args:
            strategy: The option.

        Returns:
            Whether it is so.
        """
        cls.check_exists(strategy)
        return strategy == cls.BATCH_AVERAGE

    @classmethod
    def is_sqrt(cls, strategy: str) -> bool:
        """Tell whether columns are pulled back.

        Args:
            strategy: The option.

        Returns:
            Whether it is so.
        """
        cls.check_exists(strategy)
        return strategy == cls.SQRT


class ExpectationApproximation(_Options):
    """Which expectations over the batch are taken to factorize."""

    BOTEV_MARTENS = "E[J^T E(H) J]"
    CHEN = "E(J^T) E(H) E(J)"
    CHOICES = [BOTEV_MARTENS, CHEN]

    @classmethod
    def should_average_param_jac(cls, strategy: str) -> bool:
        """Tell whether the parameters' Jacobian is averaged over the batch.

        Args:
            strategy: The option.

        Returns:
            Whether it is so.
        """
        cls.check_exists(strategy)
        return strategy == cls.CHEN
