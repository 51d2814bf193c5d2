"""What a context says when it is left: which parameters got no result, and why."""

from __future__ import annotations

from typing import Any, Iterable, Sequence
from weakref import ref

from torch.nn import Module, Parameter

from backpack.converter.reading import inputs_of_layers
from backpack.engine.forward.hooks import is_hooked
from backpack.utils.errors import warn_user
from backpack.utils.hooks import EXTENDED, modules_in, parameters_of

NOT_REACHED = (
    "the backward pass did not reach it. That is as it should be where the model took "
    "another branch this time, as to other experts; else compute the loss from it, or "
    "freeze it with `requires_grad_(False)`"
)
NOT_RECORDED = (
    "no call of its module was recorded. It was extended after the forward pass; or "
    "that ran inside `disable()` or a transform of `torch.func`, or in a hook of "
    "another backward pass before a context was entered there; or a function took "
    "the parameter while no extended module was being called; or it enters no more "
    "than a derivative of the model, of which autograd does not say on which inputs it "
    "depends (`maximum`, `clamp` and `where` choose the piece). Call `extend` first, "
    "then the module itself, and without any of these; or extend a module whose "
    "`forward` calls the transform"
)
NO_HOOKS = (
    "its module is not in an extended model, or the hooks were removed; extend it"
)
NOT_IN_RULE = (
    "{ext} has a rule for its module, {rule}, which saves nothing for it; add its name "
    "to the rule's `params`, or correct the spelling there"
)
RULE_AROUND = (
    "{ext} has a rule for a module around its own, {rule}, and takes that module as a "
    "whole, as it does more than call the modules inside. Let the rule's `__call__` "
    "save a value for it, too, or leave that class of modules without a rule"
)
MADE_INTO = (
    "{ext} has a rule for its module, {rule}, which is about the parametrized tensor, "
    "and not about what that is made of; remove the parametrization, or leave this "
    "class of modules without a rule"
)
REPLACED = (
    "its module was called with something else in its place, as by "
    "`torch.func.functional_call`, and {ext} saves values on what was given, if that "
    "is a leaf. Call the module itself, or give `tensor.detach().requires_grad_()`"
)
AS_INPUT = (
    "it is the input of a layer, as of one that computes weights, and {ext} has values "
    "for parameters of layers and operands of functions. Call the function in place of "
    "the layer, `linear(z, layer.weight, layer.bias)`, or use an extension of the GGN "
    "family by columns"
)
BEHIND_COMPLEX = (
    "it is used with complex numbers, and {ext} walks from module to module, whose "
    "rules are for real ones. Let one module of your own, which has the parameter, do "
    "all that is done with complex numbers, from real tensors to real ones, and leave "
    "`use_converter` out, which would open it; or use an extension of the GGN family "
    "by columns"
)
OF_LOSS = (
    "its module is a loss, or part of one, and {ext} is about what a loss is computed "
    "from, not about its own parameters. Freeze it with `requires_grad_(False)`, or "
    "let the model do what it does"
)
INTRODUCTION = (
    "No result was computed for the following trainable parameters of extended modules:"
)
NOTHING_EXTENDED = (
    "The backward pass met no extended module with parameters, so nothing was "
    "computed. Call `extend(model)` before the forward pass, besides extending the "
    "loss, and run it outside of `disable()`."
)

ONLY_OUTSIDE = (
    "No backward pass ran inside of this context, but one did outside of it, before or "
    "in another thread, so nothing was computed. Call `backward()` inside of `with "
    "backpack(...)`, in the same thread."
)

ONLY_DERIVATIVE = (
    "All that ran inside of this context are derivatives with respect to inputs, with "
    "`create_graph=True`, as a loss contains that penalizes them, so nothing was "
    "computed. Call `backward()` on that loss inside of the context; or, if quantities "
    "of what was differentiated are meant, leave `create_graph=True` or `inputs` out."
)


class Report:
    """What happened inside a context.

    Attributes:
        saved: Identities of extensions and the parameters on which they saved a value.
        reached: Identities of the leaf tensors that a backward pass reached.
        used: Identities of those that entered an operation, from which a gradient need
            not lead to them.
        behind_complex: Identities of those that complex numbers are made of, which an
            extension met that walks from module to module.
        met: Identities of the modules that had their turn.
        wanted: Identities of the trainable parameters of extended models.
        plain: Identities of extended modules without parameters, like losses.
        in_losses: Identities of modules that are losses, or parts of them.
        ran: Whether there was a backward pass.
        derived: Whether there was one for a derivative that a loss may contain.
        failed: Whether a backward pass ended in an exception, which says enough.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.saved: set[tuple[int, int]] = set()
        self.reached: set[int] = set()
        self.used: set[int] = set()
        self.behind_complex: set[int] = set()
        self.met: set[int] = set()
        self.wanted: set[int] = set()
        self.plain: set[int] = set()
        self.in_losses: set[int] = set()
        self.ran = self.derived = self.failed = False
        self._known: dict[int, ref] = {}  # what has these identities

    def _forget_gone(self) -> None:
        """Forget what is gone, before something else has its identity."""
        gone = {number for number, x in self._known.items() if x() is None}
        if not gone:
            return
        for number in gone:
            del self._known[number]
        own = self.reached, self.used, self.behind_complex, self.met
        for numbers in (*own, self.wanted, self.plain, self.in_losses):
            numbers -= gone
        self.saved = {pair for pair in self.saved if pair[1] not in gone}

    def begin(self, extensions: Iterable[Any]) -> None:
        """Begin a backward pass: note which parameters should get a result.

        The values of parameters that were frozen since they were computed are deleted.

        Args:
            extensions: The extensions that are active.
        """
        self.ran = True
        self._forget_gone()
        for root in list(EXTENDED):
            modules = modules_in(root)
            params = parameters_of(modules)
            for x in (*modules, *params):
                self._known.setdefault(id(x), ref(x))
            if not params:
                self.plain.update(map(id, modules))
            self.wanted.update([id(param) for param in params if param.requires_grad])
            for param in [param for param in params if not param.requires_grad]:
                for ext in extensions:
                    vars(param).pop(ext.savefield, None)

    def warn(self, extensions: Sequence[Any], ran_outside: bool) -> None:
        """Warn about parameters without a result, once.

        Args:
            extensions: The extensions that were active.
            ran_outside: Whether there was a backward pass before the context.
        """
        if extensions and not self.ran and (self.derived or ran_outside):
            warn_user(ONLY_DERIVATIVE if self.derived else ONLY_OUTSIDE)
        self._forget_gone()
        if self.failed or not (extensions and self.reached):
            return
        keys, wanted = [id(ext) for ext in extensions], self.wanted
        if wanted and {(k, param) for k in keys for param in wanted} <= self.saved:
            return
        missing: dict[str, list[str]] = {}
        touched = {param for _, param in self.saved} | self.reached
        for root in list(EXTENDED):
            wanted = {id(p) for p in parameters_of(modules_in(root)) if p.requires_grad}
            if wanted.isdisjoint(touched):
                continue
            if any((key, param) not in self.saved for key in keys for param in wanted):
                self._collect(root, extensions, missing)
        if missing:
            lines = [f"- {', '.join(v)}: {reason}" for reason, v in missing.items()]
            warn_user("\n".join([INTRODUCTION, *lines]))
        elif self.met <= self.plain and not self.saved:
            warn_user(NOTHING_EXTENDED)

    def _collect(
        self, root: Module, extensions: Sequence[Any], missing: dict[str, list[str]]
    ) -> None:
        """Collect the names of a model's parameters without a result, by reason."""
        for name, param in root.named_parameters():
            for ext in extensions:
                if param.requires_grad and (id(ext), id(param)) not in self.saved:
                    reason = self._reason(ext, root, name, param)
                    if reason is not None and name not in missing.get(reason, ()):
                        missing.setdefault(reason, []).append(name)

    def _reason(
        self, ext: Any, root: Module, name: str, param: Parameter
    ) -> str | None:
        if id(param) not in self.reached:
            return NOT_REACHED
        path = name.split(".")[:-1]
        parametrized = "parametrizations" in path
        if parametrized:  # of the module that is around these
            path = path[: path.index("parametrizations")]
        module = root.get_submodule(".".join(path))
        is_curvature = ext.expects_backpropagation_quantities()
        if is_curvature and id(module) in self.in_losses:
            return OF_LOSS.format(ext=type(ext).__name__)
        if ext.walks_modules and id(param) in self.behind_complex:
            return BEHIND_COMPLEX.format(ext=type(ext).__name__)
        around = [root.get_submodule(".".join(path[:i])) for i in range(len(path))]
        rules = [ext.get_module_extension(x) for x in around if ext.is_customized(x)]
        if ext.walks_modules and ext.default_rule and rules:
            rule = type(rules[-1]).__name__
            return RULE_AROUND.format(ext=type(ext).__name__, rule=rule)
        is_seen = id(param) in self.used and not ext.walks_modules
        if id(module) in self.met:
            rule = ext.get_module_extension(module)
            if rule is None:
                return None  # `fail_mode` has told what to say, and when
            if ext.is_customized(module):
                text = MADE_INTO if parametrized else NOT_IN_RULE
            elif name in inputs_of_layers(root):
                text = AS_INPUT
            else:
                text = NOT_REACHED if is_seen else REPLACED
            return text.format(ext=type(ext).__name__, rule=type(rule).__name__)
        if is_seen:
            return NOT_REACHED
        return NOT_RECORDED if is_hooked(module) else NO_HOOKS
