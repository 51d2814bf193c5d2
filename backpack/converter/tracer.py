"""The tracer, and what it puts in the place of tensors and training flags."""

import dis
import math
import operator
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import einops
import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy, Tracer
from torch.fx import wrap as fx_wrap
from torch.fx.proxy import Attribute, TraceError
from torch.jit import ScriptModule
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from backpack.custom_module.branching import Parallel, _Branch
from backpack.utils.errors import warn_user
from backpack.utils.hooks import has_own_rule

_IS_INSTANCE, _LEN = isinstance, len  # in whose place there are others meanwhile
NO_GRAD, CLASS = "no_grad", "class"  # keys in the metadata of nodes
MADE = "_tensor_constant"  # how torch.fx names tensors that a forward makes of no input

# Functions that make complex numbers, besides all in torch.fft
MAKES_COMPLEX = ("view_as_complex", "complex", "polar", "stft", "cfloat", "cdouble")

FIXED_MODE = (
    "The forward of {name} depends on self.training. The converted model keeps to "
    + "{mode} mode: convert again after changing the mode."
)
ASKS = "it asks for the type of `{node}`, which only a forward pass knows"
SETS = "it sets `{name}`, which would take effect only now"


class Untraceable(Exception):
    """A submodule has to be kept as it is."""

    def __init__(self, path: str, reason: Any):
        """Store submodule and reason.

        Args:
            path: Qualified name of the submodule. Empty for the root.
            reason: Why it cannot be traced.
        """
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class TrainingFlag(int):
    """Value of ``module.training`` while tracing, which can be told from a constant."""

    owner: Module
    is_root: bool

    def __bool__(self) -> bool:
        """Refuse to decide, except for the root, which cannot be kept as it is.

        Returns:
            The flag.

        Raises:
            TraceError: If the module can be kept as it is.
        """
        if not self.is_root:
            raise TraceError("it depends on self.training")
        name, mode = type(self.owner).__name__, "training" if self == 1 else "eval"
        warn_user(FIXED_MODE.format(name=name, mode=mode))
        return self == 1


def _decide(name: str) -> Callable:
    def method(self: TrainingFlag, *args: Any) -> Any:
        return getattr(int(bool(self)), name)(*args)

    return method


for _name in "float add radd sub rsub mul rmul".split():
    setattr(TrainingFlag, f"__{_name}__", _decide(f"__{_name}__"))


class InplaceProxy(Proxy):
    """Proxy that records in-place operators, which change all aliases of a tensor."""

    def __getattr__(self, name: str) -> "_AttributeProxy":  # noqa: D105
        return _AttributeProxy(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would be lost.

        Args:
            name: Name of the attribute.
            value: What it is set to.

        Raises:
            TraceError: If it is one of a tensor.
        """
        if hasattr(Tensor, name):
            raise TraceError(SETS.format(name=name))
        super().__setattr__(name, value)


class _AttributeProxy(InplaceProxy, Attribute):
    """Proxy of an attribute, or a method."""


def _class_of(node: Node, root: Module) -> Optional[type]:
    """Tell what class a node's value has, ``None`` if that depends on the input."""
    of = [source.meta[CLASS] for source in node.all_input_nodes]
    if node.op == "placeholder":  # with its default
        return type(node.args[0]) if node.args else Tensor
    if node.op == "get_attr":
        names = {name for name, _ in root.named_parameters(remove_duplicate=False)}
        return Parameter if node.target in names else Tensor
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
            return tuple
        one = type(layer).forward.__module__.startswith("torch.nn")
        return Tensor if one and not getattr(layer, "return_indices", False) else None
    if not any(issubclass(kind or object, Tensor) for kind in of):
        sizes = of[:1] == [torch.Size] and node.target is operator.getitem
        return int if sizes and isinstance(node.args[1], int) else None
    name = node.args[1] if node.target is getattr else node.target
    name = name if isinstance(name, str) else getattr(name, "__name__", "")
    if name in ("size", "shape"):
        return int if len(node.args) > 1 + (node.target is getattr) else torch.Size
    if name in ("dim", "ndim", "ndimension", "numel", "nelement"):
        return int
    results = [[str(x.type) for x in returns] for returns in _returns_of(name)]
    one = ["Tensor"] in results or name == "getitem"
    several = any(len(types) > 1 or types == ["List[Tensor]"] for types in results)
    return None if one is several else Tensor if one else tuple


def _makes_complex(node: Node) -> bool:
    """Tell whether a function or method makes complex numbers, also of real ones."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    values = tree_leaves((node.args, node.kwargs))
    return (
        name.startswith("fft_")
        or name in MAKES_COMPLEX
        or any(_IS_INSTANCE(value, complex) for value in values)
        or any(_IS_INSTANCE(x, torch.dtype) and x.is_complex for x in values)
    )


def _returns_of(name: str) -> List[Sequence[Any]]:
    """List what each overload of an operation returns; none if it is not known."""
    known = getattr(torch.ops.aten, name, None)
    overloads = () if known is None else known.overloads()
    return [getattr(known, overload)._schema.returns for overload in overloads]


def _place_of(name: str, node: Node) -> Optional[int]:
    """Tell which element of a tuple is called so, like the `values` of a maximum."""
    of = node.target if node.op in ("call_function", "call_method") else ""
    of = of if isinstance(of, str) else getattr(of, "__name__", "")
    names = [[x.name for x in returns] for returns in _returns_of(of)]
    places = {one.index(name) for one in names if name in one and len(one) > 1}
    return places.pop() if len(places) == 1 else None


def is_instance(value: Any, kinds: Any) -> bool:
    """Tell what a forward asks by `isinstance`: what a proxy stands for.

    Args:
        value: Any value.
        kinds: A class, or several.

    Returns:
        Whether the value, or what it stands for, is an instance of one.

    Raises:
        NotImplementedError: If that depends on the input.
    """
    asks = sys._getframe(1).f_globals.get("__name__", "")
    tracing = asks.startswith(("torch.", "backpack."))
    if tracing or type(value) not in (InplaceProxy, _AttributeProxy):
        return _IS_INSTANCE(value, kinds)
    found = value.node.meta[CLASS]
    if found is None:
        raise NotImplementedError(ASKS.format(node=value.node.format_node()))
    return issubclass(found, kinds)


def length(value: Any) -> Any:
    """Record a forward's `len`, from which Python takes nothing but a number.

    Args:
        value: Any value.

    Returns:
        Its length, or a proxy for it.
    """
    if _IS_INSTANCE(value, Proxy):
        return value.tracer.create_proxy("call_function", _LEN, (value,), {})
    return _LEN(value)


def _record_inplace(target: Callable) -> Callable:
    def method(self: Proxy, *args: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", target, (self, *args), {})

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    _target = getattr(operator, f"i{_name}")
    setattr(InplaceProxy, f"__i{_name}__", _record_inplace(_target))
InplaceProxy.__setitem__ = _record_inplace(operator.setitem)  # type: ignore


@fx_wrap
def require_default(value: Any, default: Any, name: str) -> None:
    """Refuse an argument that was fixed when the model was converted.

    Args:
        value: Value of the argument.
        default: What it was fixed to.
        name: Name of the argument.

    Raises:
        ValueError: If the values differ.
    """
    if isinstance(value, Tensor) or value != default:
        raise ValueError(
            f"The model was converted with {name}={default!r}, because its forward may "
            + "decide on it what to do. Wrap the model in a module that passes the "
            + f"wanted {name}, and convert that."
        )


@fx_wrap
def keep(*tensors: Any) -> None:
    """Do nothing, but let a graph refer to parameters by their names.

    A graph module forgets what its graph does not refer to when it is copied.

    Args:
        tensors: A model input, so that the call is recorded, and the parameters.
    """


def is_user_module(module: Module) -> bool:
    """Whether the module's forward is written in Python outside of PyTorch and here.

    Args:
        module: The module.

    Returns:
        ``False`` if the module stands for an operation, ``True`` if it is to be traced.
    """
    if isinstance(module, ScriptModule):
        return False
    if isinstance(module, (Parallel, _Branch)):
        return True
    # Where forward was written: A subclass of Linear that inherits it is a Linear.
    origin = getattr(type(module).forward, "__module__", None) or ""
    return origin == "torch.nn.modules.container" or not origin.startswith(
        ("torch.nn", "torch.ao.nn", "backpack.custom_module", "backpack.converter")
    )


def is_opened(module: Module) -> bool:
    """Whether a module is traced through, as no extension has a rule for it.

    Args:
        module: The module.

    Returns:
        ``False`` if it stays whole.
    """
    return is_user_module(module) and not has_own_rule(module)


class BackpackTracer(Tracer):
    """Tracer that stops at operations: PyTorch's layers, ours, and the untraceable.

    It stops at modules with a rule, too, which would not be used for what is inside.

    Attributes:
        keep_whole: Qualified names of the untraceable.
        opened: Classes of the modules that were traced through.
    """

    # Otherwise, self.mask[:, :length] fails, as fx has no say in what a tensor does
    proxy_buffer_attributes = True

    def __init__(self, keep_whole: Tuple[str, ...] = ()):
        """Set up the tracer.

        Args:
            keep_whole: Qualified names of further modules to stop at. Default: None.
        """
        super().__init__(autowrap_modules=(math, einops))  # type: ignore[arg-type]
        self.keep_whole = keep_whole
        self.opened: Set[type] = set()
        self._path = ""  # innermost module that was entered with gradients on

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Decide whether a module is recorded as one operation, or traced through.

        Args:
            m: The module.
            module_qualified_name: Its name in the traced model.

        Returns:
            Whether the module is an operation. Containers, among them ``Parallel``, are
            none.
        """
        return module_qualified_name in self.keep_whole or not is_opened(m)

    def getattr(self, attr: str, attr_val: Any, *cache: Any) -> Any:
        """Return an attribute of a module.

        Args:
            attr: Its name.
            attr_val: Its value.
            cache: Where proxies of parameters and buffers are kept.

        Returns:
            What the forward has set it to; else a parameter's or a buffer's proxy.
        """
        if isinstance(attr_val, Proxy):
            return attr_val
        return super().getattr(attr, attr_val, *cache)

    def proxy(self, node: Node) -> Proxy:
        """Create the proxy of a node.

        Args:
            node: The node.

        Returns:
            The proxy.
        """
        return InplaceProxy(node, self)

    def create_node(
        self, kind: str, target: Any, args: tuple, *more: Any, **options: Any
    ) -> Node:
        """Create a node, and note whether gradients are switched off.

        Args:
            kind: Kind of node.
            target: What it calls, or takes.
            args: Its arguments.
            more: Further properties.
            options: The same by name.

        Returns:
            The node, with the module that has switched gradients off in its metadata.
            What is called ``values`` in a tuple is taken by its number.

        Raises:
            NotImplementedError: If it would be lost in the graph, or have no effect
                there.
        """
        if target is getattr and isinstance(args[0], Node):
            place = _place_of(args[1], args[0])
            if place is not None:
                target, args = operator.getitem, (args[0], place)
        node = super().create_node(kind, target, args, *more, **options)
        node.meta[CLASS] = _class_of(node, self.root)
        out = node.kwargs.get("out")
        if node.op == "call_function" and isinstance(out, (Node, tuple, list)):
            text = "it writes to a tensor that it passes as `out`"
            raise NotImplementedError(text)
        name = getattr(target, "__name__", "")
        if name.startswith("_foreach_") and name.endswith("_"):
            raise NotImplementedError(f"it writes to a list of tensors, by `{name}`")
        if self._path and _makes_complex(node):
            module = self.root.get_submodule(self._path)
            if not any(True for _ in (*module.parameters(), *module.children())):
                # As a whole, it may map real numbers to real ones, which have rules
                raise Untraceable(self._path, "it computes with complex numbers")
        owners = {source.op for source in node.all_input_nodes}
        if node.target == "requires_grad_" and owners == {"get_attr"}:
            raise NotImplementedError(SETS.format(name=node.target))
        if not torch.is_grad_enabled():
            node.meta[NO_GRAD] = self._path
        return node

    def call_module(
        self,
        m: Module,
        forward: Callable[..., Any],
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
    ) -> Any:
        """Trace the call of a submodule.

        Args:
            m: The submodule.
            forward: Its forward.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            Proxy of the output, or whatever a traced forward returns.

        Raises:
            Untraceable: If the submodule's forward cannot be traced.
        """
        if m not in self.submodule_paths:  # made in the forward
            return forward(*args, **kwargs)
        path, outer = self.path_of_module(m), self._path
        self._path = path if torch.is_grad_enabled() else outer
        if not self.is_leaf_module(m, path):
            self.opened.add(type(m))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Untraceable:
            raise
        # Proxies fail in as many ways as there are uses of a number or tensor.
        except Exception as error:
            raise Untraceable(path, error) from error
        finally:
            self._path = outer

    def create_args_for_root(
        self, root_fn: Callable, is_module: bool, concrete_args: Any = None
    ) -> Tuple[Callable, List[Any]]:
        """Fix optional arguments to their default, unless it is a number.

        Nothing tells the tracer that a forward asks ``if mask is not None``.

        Args:
            root_fn: The forward.
            is_module: Whether it belongs to a module.
            concrete_args: Values that the caller fixes. Default: ``None``.

        Returns:
            The function to trace and its arguments.
        """
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        fixed = [self._fix_to_default(arg) for arg in args]
        return fn, fixed

    def _fix_to_default(self, arg: Any) -> Any:
        if not isinstance(arg, Proxy) or not arg.node.args:
            return arg
        default = arg.node.args[0]
        if default is None or isinstance(default, (bool, str)):
            args = (arg.node, default, arg.node.name)
            node = self.create_node("call_function", require_default, args, {})
            node.meta["is_wrapped"] = True
            return default
        return arg

    def to_bool(self, obj: Proxy) -> bool:
        """Let assertions pass.

        Args:
            obj: The proxy whose truth is asked for.

        Returns:
            ``True`` in an assertion.
        """
        frame = sys._getframe(2)  # the one that evaluates bool(proxy)
        following = (
            instruction
            for instruction in dis.get_instructions(frame.f_code)
            if instruction.offset > frame.f_lasti
            and not instruction.opname.startswith(("POP_JUMP", "CACHE", "NOT_TAKEN"))
        )
        instruction = next(following, None)
        if instruction is not None and (
            instruction.opname == "LOAD_ASSERTION_ERROR"
            or instruction.argval is AssertionError
        ):
            return True
        return super().to_bool(obj)
