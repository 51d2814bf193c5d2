"""The Jacobian of a model's output."""

from __future__ import annotations

from torch import Tensor

from backpack.extensions.secondorder.columns import ColumnExtension, Source
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN
from backpack.extensions.shards import Piece
from backpack.utils.subsampling import Selection


class BatchJacobian(SqrtGGN):
    """Jacobian of a model's output with respect to each parameter, for each sample.

    Saved in ``jacobian``, of shape ``[C, N, *p]``: the derivative of the c-th feature
    of sample n's output, in the order in which a sample's features are in the output,
    whatever axes it has. No loss is needed, and no loss's scale enters::

        with backpack(BatchJacobian(), gradient=False):
            model(X).sum().backward()

    It starts at the output of the extended model, the only one in the backward pass;
    what is computed from it, a sum or a loss, does not matter. Features are pulled back
    as the columns of the Gauss-Newton matrix's square root are.
    """

    takes_rules = False

    def __init__(self, subsampling: Selection = None):
        """Choose the samples.

        Args:
            subsampling: Samples to consider, by index. Default: ``None`` for all.
        """
        ColumnExtension.__init__(self, "jacobian", Source("identity"), subsampling)

    def expects_backpropagation_quantities(self) -> bool:
        """Tell that nothing is pulled back from a loss.

        Returns:
            ``False``.
        """
        return False

    def over_shards(self, value: Tensor, piece: Piece) -> Tensor:  # noqa: D102
        return piece.local(value, 1.0, dim=1)
