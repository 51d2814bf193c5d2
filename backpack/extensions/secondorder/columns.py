"""The GGN family: columns that autograd pulls back through the model's own graph."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from backpack.core.derivatives.loss_base import as_option
from backpack.core.per_sample.base import PerSample
from backpack.core.table import built_in, find_loss
from backpack.engine.backward.coverage import check_batch_norm
from backpack.engine.backward.turn import current_turn, loss_scale
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder import walk
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.errors import check_choice, check_generator
from backpack.utils.subsampling import Selection, plain, subsample
from backpack.utils.types import Grads, Layer, Randomness

FISHER_TYPES = ("mc", "empirical")
EXACT_TOO = ("mc", "exact", "empirical")


@dataclass(frozen=True)
class Source:
    """Where columns come from; extensions with the same source share their columns.

    Attributes:
        strategy: ``"exact"`` for a factor of the loss Hessian, ``"sampling"`` for
            would-be gradients of targets drawn from the model's own distribution,
            ``"empirical"`` for the gradient itself.
        mc_samples: Number of samples, for ``"sampling"``.
        generator: Random number generator, for ``"sampling"``; PyTorch's global one
            if ``None``.
        compact: Whether columns may be combined into fewer, for ``"exact"``.
    """

    strategy: str
    mc_samples: int = 1
    generator: Randomness = None
    compact: bool = False

    @classmethod
    def fisher(
        cls,
        ext: Any,
        fisher_type: str,
        mc_samples: int,
        generator: Randomness,
        types: Sequence[str] = FISHER_TYPES,
    ) -> Source:
        """Choose whose targets the gradients of the Fisher are taken for.

        Args:
            ext: The extension.
            fisher_type: ``"mc"``, ``"empirical"`` or ``"exact"``.
            mc_samples: Number of Monte-Carlo samples, for ``"mc"``.
            generator: Random number generator, for ``"mc"``.
            types: Which of them there are. Default: all but ``"exact"``.

        Returns:
            The source of columns.

        Raises:
            ValueError: If an option is not one of those.
        """
        name = type(ext).__name__
        mc_samples = plain(mc_samples)
        whole = isinstance(mc_samples, Integral) and not isinstance(mc_samples, bool)
        if not whole or mc_samples < 1:
            raise ValueError(
                f"{name}: mc_samples must be a positive integer, got {mc_samples!r}. "
                "Pass the number of targets to draw, for instance mc_samples=1."
            )
        check_generator(name, generator)
        check_choice(name, "fisher_type", fisher_type, types)
        if fisher_type == "mc":
            return cls("sampling", mc_samples, generator)
        return cls(fisher_type, compact=fisher_type == "exact")

    @property
    def is_exact(self) -> bool:
        """Whether columns are those of a factor of the loss Hessian."""
        return self.strategy == "exact"

    @property
    def complete(self) -> Source:
        """The same source without columns combined."""
        return replace(self, compact=False)

    def columns(self, derivatives: Any, module: Layer) -> Tensor:
        """Compute the columns at the loss input, all of them.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.

        Returns:
            Columns ``[V, N, *]``.
        """
        if self.strategy == "sampling":
            options = {"mc_samples": self.mc_samples, **as_option(self.generator)}
            return derivatives.sqrt_hessian_sampled(module, (), (), **options)
        if self.strategy == "empirical":
            return derivatives.scaled_gradient(module)
        return derivatives.sqrt_hessian(module, (), ())

    def chunks(self, derivatives: Any, module: Layer, size: int) -> Iterator[Tensor]:
        """Compute the columns at the loss input, some at a time.

        Args:
            derivatives: The loss's derivatives.
            module: The loss module, with its inputs and output.
            size: Number of columns at a time.

        Yields:
            Columns ``[V, N, *]`` with V at most ``size``.
        """
        if self.strategy == "exact":
            yield from derivatives.sqrt_hessian_chunks(module, size, self.compact)
        else:
            yield from self.columns(derivatives, module).split(size)


class ReduceColumns(ModuleExtension):
    """Reduce the columns at a module's output; the same for every module."""

    def __call__(
        self, extension: Any, module: Layer, g_inp: Grads, g_out: Grads
    ) -> None:
        """Save the extension's value on each parameter of a module.

        Args:
            extension: The extension that is running.
            module: The module.
            g_inp: Gradients at the inputs, as far as they exist.
            g_out: Gradients at the outputs.
        """
        if isinstance(module, _BatchNorm):
            check_batch_norm(current_turn())
        if extension.walks_modules:
            self._walk(extension, module, g_inp, g_out)

    def _walk(self, extension: Any, module: Layer, g_inp: Grads, g_out: Grads) -> None:
        """Do the same by module rules: a user's module extension takes part."""
        turn = current_turn()
        if turn.call.is_loss:
            columns = extension.source.columns(find_loss(module).derivatives, module)
            extension.check_batch(columns.shape[1])
            columns = subsample(columns, dim=1, subsampling=extension.get_subsampling())
            columns = turn.backward_pass.pull_back.behind(extension, columns)
            turn.pass_on(extension, columns * loss_scale(module, g_out[0]))
            return
        if walk.skips(turn, extension):
            return
        columns, some = turn.incoming(extension), extension.get_subsampling()
        all_samples = columns
        if some is not None:
            all_samples = columns.new_zeros(len(columns), *turn.call.output_shapes[0])
            all_samples[:, some] = columns
        frozen = walk.freeze_call(turn)
        for name, param in turn.parameters:
            rule = turn.derivatives_for(name)
            product = rule.stored_product(name, frozen, (), g_out, all_samples)
            extension.check(turn.call, param, product)
            value = extension.for_parameter(param).reduce(product)
            turn.save_alone(extension, param, value)
        producers = turn.producers(extension)
        if producers:
            linear = walk.linearize(turn, extension, producers, frozen)
            linear = linear if some is None else linear.select(some)
            pulled = linear.jac_t(columns)
            walk.check_samples_kept(linear, extension)
            turn.pass_on(extension, linear.at_positions(pulled))


class ColumnExtension(SecondOrderBackpropExtension):
    """Base class of the GGN family: a reduction of columns ``S[v, n]ᵀ J[n]``.

    Attributes:
        source: Where the columns come from.
        loss_hessian_strategy: How the loss Hessian is factored.
        additive: Whether the quantity is a sum over columns.
        looks_again: Whether all columns are needed twice, see :meth:`again`.
    """

    additive = True
    looks_again = False
    pulls_columns = True
    walks_modules = False
    separates_samples = True
    default_rule: ModuleExtension | None = ReduceColumns()

    def __init__(self, savefield: str, source: Source, subsampling: Selection = None):
        """Store where columns come from and values go to.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            source: Where the columns come from.
            subsampling: Samples to consider, by index. Default: ``None`` for all.
        """
        self.source, self.loss_hessian_strategy = source, source.strategy
        # not the next class in line: KFAC and KFLR have a second base class
        rules = built_in(self.default_rule)
        BackpropExtension.__init__(self, savefield, rules, subsampling=subsampling)

    @abstractmethod
    def statistic(self, product: PerSample) -> Any:
        """Reduce columns to what adds up over columns.

        Args:
            product: Products of columns and a parameter's Jacobian.

        Returns:
            The statistic.
        """

    def finish(self, product: PerSample, statistic: Any) -> Any:
        """Turn the sum of all columns' statistics into the quantity.

        Args:
            product: Products of any columns and the parameter's Jacobian.
            statistic: Sum of the statistics.

        Returns:
            The quantity. By default the statistic itself.
        """
        return statistic

    def for_parameter(self, param: Tensor) -> ColumnExtension:
        """Return what reduces the columns at a parameter.

        Args:
            param: The parameter.

        Returns:
            The extension itself, unless what it does depends on the parameter.
        """
        return self

    def again(self, product: PerSample, statistic: Any) -> ColumnExtension:
        """Return what reduces all columns once more, as it knows their statistic.

        Args:
            product: Products of any columns and the parameter's Jacobian.
            statistic: Sum of all columns' statistics.

        Returns:
            Extension whose statistics replace the first ones; the same by default.
        """
        return self

    def combine(self, existing: Tensor, other: Tensor) -> Tensor:
        """Combine the statistics of two sets of columns.

        Args:
            existing: Statistic of the first columns.
            other: Statistic of the other ones.

        Returns:
            Statistic of all of them, by default their sum.
        """
        return existing + other

    def compute(self, turn: Any) -> None:
        """Reduce the columns at parameters.

        Args:
            turn: The parameters' turn.
        """
        for param, value in turn.columns(self):
            turn.save(self, param, value)

    def check(self, where: Any, param: Tensor, product: PerSample) -> None:
        """Refuse a parameter for which the quantity is not defined, by an exception.

        Args:
            where: A call, or a group of parameters, for messages.
            param: The parameter.
            product: Products of columns and its Jacobian.
        """

    def reduce(self, product: PerSample) -> Any:
        """Compute the quantity from all columns at once.

        Args:
            product: Products of all columns and a parameter's Jacobian.

        Returns:
            The quantity.
        """
        return self.finish(product, self.statistic(product))

    def add(self, existing: Any, other: Any) -> Any:
        """Combine the contributions of two losses to one parameter.

        Args:
            existing: One loss's contribution.
            other: The other's.

        Returns:
            Their combination, the sum by default.
        """
        return existing + other

    def join(
        self,
        existing: Any,
        other: Any,
        product: PerSample,
        what: Callable[[], str],
        alike: bool,
    ) -> Any:
        """Combine the contributions of two losses to a parameter with several uses.

        Args:
            existing: One loss's contribution, or that of several.
            other: Another's.
            product: Products of any of the other's columns and a Jacobian.
            what: Names the parameter, and where it is used.
            alike: Whether both see the same uses.

        Returns:
            Their combination, that of :meth:`add` by default.
        """
        return self.add(existing, other)

    def accumulate_backpropagated_quantities(
        self, existing: Tensor, other: Tensor
    ) -> Tensor:
        """Add columns that two consumers of an output pull back to it.

        Args:
            existing: Columns ``[V, N, *]``.
            other: Columns ``[W, N, *]``.

        Returns:
            Their sum; columns that only one of both has are zero in the other.
        """
        shorter, longer = sorted((existing, other), key=len)
        missing = longer.new_zeros(len(longer) - len(shorter), *longer.shape[1:])
        return longer + torch.cat([shorter, missing])

    def get_loss_hessian_strategy(self) -> str:
        """Return how the loss Hessian is factored.

        Returns:
            ``"exact"`` or ``"sampling"``.
        """
        return self.source.strategy

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte-Carlo samples.

        Returns:
            The number.
        """
        return self.source.mc_samples

    def set_module_extension(
        self, module: type, extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Register what to do on a class of modules.

        It gets all columns of the loss Hessian's factor, instead of as few as possible.
        If it overrides ``backpropagate``, the columns go from module to module.

        Args:
            module: The class.
            extension: What to do on it.
            overwrite: Whether an existing entry is replaced. Default: ``False``.
        """
        super().set_module_extension(module, extension, overwrite=overwrite)
        inherited = ModuleExtension.backpropagate
        self.walks_modules |= type(extension).backpropagate is not inherited
        self.source = replace(self.source, compact=False)

    def runs_on(self, call: Any) -> bool:  # noqa: D102
        checked = call.is_loss or isinstance(call.module, _BatchNorm)
        return checked or self.walks_modules or self.is_customized(call.module)
