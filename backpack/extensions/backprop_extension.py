"""What all extensions have in common."""

from __future__ import annotations

from abc import ABC
from contextlib import contextmanager
from inspect import Signature, signature
from typing import Any, Iterator, Mapping, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.stored import stored_inputs
from backpack.core.per_sample.base import PerSample
from backpack.core.table import lookup
from backpack.engine.backward.backward_pass import BackwardPass
from backpack.engine.backward.turn import Turn, current_turn, is_turn_of
from backpack.engine.nodes.record import Call
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.saved_quantities import SavedQuantities
from backpack.extensions.shards import Piece, Shard, shard_of
from backpack.utils.errors import check_choice, warn_user
from backpack.utils.hooks import RULED, message, name_module, represent_call
from backpack.utils.state import State, state
from backpack.utils.subsampling import (
    Selection,
    Subsampling,
    as_subsampling,
    check_subsampling,
)
from backpack.utils.types import FailMode, Grads, Layer, undisturbed

FAIL_ERROR: FailMode = "ERROR"
FAIL_WARN: FailMode = "WARNING"
FAIL_SILENT: FailMode = "SILENT"
FAIL_MODES = (FAIL_ERROR, FAIL_WARN, FAIL_SILENT)
Extension = TypeVar("Extension", bound="BackpropExtension")

BY_HAND = "{ext} (field '{field}') was called by hand on {module}, {reason}"
FROM_OTHERS = (
    "but needs what comes from the loss, or all parameters. Run a backward pass of the "
    "extended model inside `with backpack(...)`."
)
NO_CALL = (
    "which has no `input0` and `output`, or one of another shape than the gradient at "
    "the output. Extend and call it, or use `hook_store_io(module, input, output)`."
)
NAMES_TAKEN = (
    "{ext} (field '{field}'): {module} has a parameter, buffer, module or member of "
    "its class by the name `output` or `input0`, `input1`, ..., where what went into a "
    "module and came out is stored for rules that go from module to module. Give it "
    "another name, or use a quantity of first order or of the GGN family."
)


class BackpropExtension(ABC):  # noqa: B024
    """Base class for the quantities that can be computed in a backward pass.

    Attributes:
        savefield: Attribute of a parameter under which its value is saved.
        saved_quantities: What waits for a call's turn in the backward pass.
        default_rule: What to do on modules for which nothing is registered.
        keeps_io: Whether modules keep their inputs and output after a backward pass.
        adds_up_from: From this number of positions on that share a parameter, its
            individual gradients are formed and cheap to add up; ``None`` for never.
        pulls_columns: Whether it reduces columns that losses pull back.
        takes_rules: Whether a user may register what to do on a class of modules.
        replaces_gradient: Whether what it computes is accumulated in ``.grad``, instead
            of the gradient.
        separates_samples: Whether the values presume that axis 0 holds samples which do
            not influence each other.
        needs_all_uses: Whether values are wrong where a parameter is used and nothing
            has seen it; so it is if samples are separate.
        refuses_coupled_samples: Whether it is an error if a batch normalization in
            training mode makes them do so. It is a warning otherwise.
        takes_complex: Whether it is defined for parameters that are complex numbers:
            it is linear in what their products are.
        shard: What the last backward pass has seen, if several processes share the
            batch.
    """

    __signature__: Signature
    _arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
    shard: Shard | None = None
    default_rule: ModuleExtension | None = None
    keeps_io = False
    pulls_columns = False
    adds_up_from: int | None = None
    takes_rules = True
    replaces_gradient = False
    separates_samples = needs_all_uses = False
    refuses_coupled_samples = True
    takes_complex = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let tools show the constructor's arguments, not those of ``__new__``."""
        super().__init_subclass__(**kwargs)
        arguments = list(signature(cls.__init__).parameters.values())
        cls.__signature__ = Signature(arguments[1:])

    def __new__(cls: type[Extension], *args: Any, **kwargs: Any) -> Extension:
        """Remember the constructor's arguments, for the ``repr``."""
        extension = super().__new__(cls)
        extension._arguments = args, kwargs
        return extension

    def __repr__(self) -> str:
        """Return how the extension was made.

        Returns:
            The class with the arguments that were given.
        """
        args, kwargs = self._arguments
        return represent_call(type(self).__name__, args, kwargs)

    def __init__(
        self,
        savefield: str,
        module_exts: Mapping[Any, ModuleExtension],
        fail_mode: FailMode = FAIL_ERROR,
        subsampling: Selection = None,
    ):
        """Store what to do on which module.

        Args:
            savefield: Attribute of a parameter under which its value is saved.
            module_exts: Module extension for each supported class of modules.
            fail_mode: What happens on a module that is not supported: ``"ERROR"``,
                ``"WARNING"`` or ``"SILENT"``. Default: ``"ERROR"``.
            subsampling: Samples to consider, by index. Default: ``None`` for all.

        Raises:
            AssertionError: If the fail mode does not exist.
        """
        name = type(self).__name__
        check_choice(name, "fail_mode", fail_mode, FAIL_MODES, AssertionError)
        self.saved_quantities = SavedQuantities()
        self.savefield = savefield
        self.__module_extensions = dict(module_exts)
        RULED.update(self.__module_extensions)
        self._fail_mode = fail_mode
        self._subsampling = as_subsampling(name, subsampling)

    def set_module_extension(
        self, module: type[Module], extension: ModuleExtension, overwrite: bool = False
    ) -> None:
        """Register what to do on a class of modules.

        Args:
            module: The class.
            extension: What to do on it.
            overwrite: Whether an existing entry is replaced. Default: ``False``.

        Raises:
            ValueError: If there is an entry and it shall not be replaced.
            NotImplementedError: If the extension takes no rules.
        """
        if not self.takes_rules:
            raise NotImplementedError(
                f"{type(self).__name__} takes no rules for {module.__name__} or any "
                "other module: it works on all of them. Leave the rule out, or use it "
                "in an extension of your own."
            )
        if module in self.__module_extensions and not overwrite:
            raise ValueError(
                f"{type(self).__name__} already has a module extension for "
                f"{module.__name__}. Pass overwrite=True to replace it."
            )
        self.__module_extensions[module] = extension
        RULED.add(module)

    def get_module_extension(self, module: Layer) -> ModuleExtension | None:
        """Look up what to do on a module.

        The exact class goes first, then its bases. What is built in for a class does
        not hold for a subclass that computes something else.

        Args:
            module: The module.

        Returns:
            What is registered, else the default; ``None`` if there is none.
        """
        return lookup(self.__module_extensions, type(module)) or self.default_rule

    def get_subsampling(self) -> Subsampling:
        """Return which samples are considered.

        Returns:
            Their indices, or a slice; ``None`` for all.
        """
        return self._subsampling

    def select(self, product: PerSample) -> PerSample:
        """Restrict products to the samples that are considered.

        Args:
            product: Products for all samples.

        Returns:
            Products for the samples that are considered.
        """
        if self._subsampling is None:
            return product
        self.check_batch(product.batch_size)
        return product.select(self._subsampling)

    def check_batch(self, size: int) -> None:
        """Check that the batch has the samples that are considered.

        Args:
            size: Number N of samples in the batch.
        """
        check_subsampling(type(self).__name__, self._subsampling, size)

    @property
    def walks_modules(self) -> bool:
        """Whether quantities go from module to module, and come from nowhere else."""
        return self.expects_backpropagation_quantities() and not self.pulls_columns

    def runs_on(self, call: Any) -> bool:
        """Tell whether there is anything to do on a call.

        Args:
            call: The call.

        Returns:
            Whether there may be, by default ``True``.
        """
        return True

    def compute(self, turn: Any) -> None:  # noqa: B027
        """Compute values of parameters all of whose uses have had their gradient.

        Args:
            turn: The parameters' turn. Default: nothing to do, as the extension works
                module by module.
        """

    def conclude(self, backward_pass: Any) -> dict[Tensor, Any]:
        """Compute values that need all parameters, when each of them has had its turn.

        Args:
            backward_pass: The backward pass. What the extension has put into its
                ``kept`` is there; without that, this is not called.

        Returns:
            Values by parameter, by default none.
        """
        return {}

    def is_customized(self, module: Layer) -> bool:
        """Tell whether a user registered what to do on a module.

        Args:
            module: The module.

        Returns:
            Whether it is so; then :meth:`compute` leaves its parameters alone.
        """
        # not by identity: extensions may be copies
        return type(self.get_module_extension(module)) is not type(self.default_rule)

    def own_rules(self) -> list[type[Module]]:
        """List the classes for which a user registered what to do.

        Returns:
            The classes, without those for which the default is built in.
        """
        rules, default = self.__module_extensions, type(self.default_rule)
        return [cls for cls, rule in rules.items() if type(rule) is not default]

    def expects_backpropagation_quantities(self) -> bool:
        """Tell whether the extension works on a quantity pulled back from the loss.

        Returns:
            Whether it does.
        """
        return False

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Combine the quantities that two consumers of an output pull back to it.

        Args:
            existing: What is there already.
            other: What comes in addition.

        Returns:
            The combination.

        Raises:
            NotImplementedError: If the extension does not define one.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: an output is used several times, and this "
            "extension does not define how to combine what is backpropagated to it. "
            "Override `accumulate_backpropagated_quantities`."
        )

    def over_shards(self, value: Any, piece: Piece) -> Any:
        """Make a parameter's value for the whole batch of those of its shards.

        It runs in all processes at once, see :func:`backpack.distributed.reduce`.

        Args:
            value: Value for this process' samples.
            piece: This process' share of the batch, with sums over processes.

        Returns:
            Value for the whole batch.

        Raises:
            NotImplementedError: If the extension does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: this extension does not define how values of "
            "several processes combine. Override `over_shards`."
        )

    def __call__(self, module: Layer, g_inp: Grads, g_out: Grads) -> None:
        """Run on a module, which may be done by hand in first order.

        Args:
            module: The module.
            g_inp: Gradients at its inputs, as far as they exist.
            g_out: Gradients at its outputs.
        """
        if not is_turn_of(module):
            with self._by_hand(module, g_out):
                return BackpropExtension.__call__(self, module, g_inp, g_out)
        shard = shard_of(self)
        if shard is not None and current_turn().call.is_loss:
            shard.meet(current_turn())
        extension = self.get_module_extension(module)
        if extension is not None:
            if self.walks_modules and current_turn().lacks_io:
                who = {"ext": self, "field": self.savefield, "module": module}
                raise NotImplementedError(message(NAMES_TAKEN, **who))
            extension(self, module, g_inp, g_out)
        elif not (self.walks_modules and current_turn().only_arranges):
            self._on_unknown(module)
            if self.walks_modules:
                current_turn().pass_on(self, None)

    @contextmanager
    def _by_hand(self, module: Layer, g_out: Grads) -> Iterator[None]:
        """Let a module have its turn outside of a backward pass.

        Args:
            module: The module, with its ``input0``, ``output``.
            g_out: Gradients at its outputs.

        Yields:
            Nothing.
        """
        if self.expects_backpropagation_quantities():
            self.refuse_by_hand(module, FROM_OTHERS)
        output: Any = getattr(module, "output", None)
        shapes = {getattr(x, "shape", None) for x in (output, g_out[0])}
        if not hasattr(module, "input0") or None in shapes or len(shapes) > 1:
            self.refuse_by_hand(module, NO_CALL)
        call, parameters = Call(module), dict(module.named_parameters(recurse=False))
        call.finish(module, stored_inputs(module), {}, [output], [], parameters)
        running = BackwardPass(State())
        running.report = state().report or running.report
        with torch.no_grad(), undisturbed(), running:
            with Turn(call, running, g_out, []):
                yield

    def refuse_by_hand(self, module: Layer, reason: str) -> None:
        """Refuse to be called by hand.

        Args:
            module: The module.
            reason: Why.

        Raises:
            RuntimeError: Always.
        """
        who = {"ext": self, "field": self.savefield, "module": module}
        raise RuntimeError(message(BY_HAND, reason=reason, **who))

    def _on_unknown(self, module: Layer) -> None:
        """Handle a module for which nothing is registered.

        Args:
            module: The module.

        Raises:
            NotImplementedError: If the fail mode says so.
        """
        needed = self.expects_backpropagation_quantities() or any(
            p.requires_grad for p in module.parameters(recurse=False)
        )
        if not needed or self._fail_mode == FAIL_SILENT:
            return
        message = (
            f"Extension {type(self).__name__} (field '{self.savefield}') has no module "
            f"extension for {type(module).__name__}: {name_module(module)}. Register "
            f"one with `set_module_extension({type(module).__name__}, ...)`."
        )
        if self._fail_mode == FAIL_ERROR:
            raise NotImplementedError(message)
        warn_user(message)
