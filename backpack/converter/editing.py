"""Changes to a traced graph: a module in place of what a node does."""

from contextlib import contextmanager
from typing import Iterator, Sequence

from torch.fx import GraphModule, Node
from torch.nn import Module

from backpack.converter.reading import CHECKS, OPERATION, leaves, operation
from backpack.converter.trace import trace
from backpack.converter.tracer import TrainingFlag


def as_graph(module: Module) -> GraphModule:
    """Trace a module, unless it is a graph already.

    Args:
        module: The module.

    Returns:
        Graph module.
    """
    return module if isinstance(module, GraphModule) else trace(module)


def recompile(graph_module: GraphModule) -> GraphModule:
    """Bring a graph module in line with its graph, which was changed.

    Args:
        graph_module: The graph module.

    Returns:
        The same, without the submodules that it does not call.
    """
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.delete_all_unused_submodules()
    return graph_module


@contextmanager
def compiled_once(graph_module: GraphModule) -> Iterator[None]:
    """Compile a graph module after all its changes, not after each.

    It would take as long as all else. And the code asks PyTorch to replace functions in
    it by others whenever something is traced, which it never forgets.

    Args:
        graph_module: The graph module.

    Yields:
        Nothing.
    """
    graph_module.__dict__["recompile"] = lambda: None
    yield
    del graph_module.__dict__["recompile"]
    graph_module.recompile()


def get_free_name(module: Module, initial_name: str) -> str:
    """Find an unused attribute name by appending a number.

    Args:
        module: Where to look.
        initial_name: What the name starts with.

    Returns:
        The name.
    """
    index = 0
    while hasattr(module, f"{initial_name}{index}"):
        index += 1
    return f"{initial_name}{index}"


def change_node_to_module(
    node: Node, name: str, base_module: Module, new_module: Module, args: tuple
) -> None:
    """Let a node call a new module instead of what it does.

    Args:
        node: The node.
        name: What the module's name starts with.
        base_module: Graph module that gets the new module.
        new_module: The new module.
        args: The module's inputs.
    """
    name = get_free_name(base_module, name)
    new_module.train(base_module.training)
    base_module.add_module(name, new_module)
    node.op = "call_module"
    node.target = name
    node.args = args
    node.kwargs = {}


def install(
    graph_module: GraphModule,
    node: Node,
    new_module: Module,
    args: tuple,
    debug: bool,
    parts: Sequence[Node] = (),
) -> None:
    """Let a node call a new module, and tell so.

    Args:
        graph_module: The graph module.
        node: The node.
        new_module: The new module. It gets the mode of the module whose training flag
            is an argument of the node.
        args: The module's inputs.
        debug: Print what is done.
        parts: Nodes that become part of the new module. Default: None.
    """
    if debug:
        print(f"  {node.format_node()}: {new_module}")
    name = operation(node).lower().strip("_")
    name = name if name.isidentifier() else "function"
    arguments = [(part.args, part.kwargs) for part in (node, *parts)]
    change_node_to_module(node, name, graph_module, new_module, args)
    for flag in leaves(arguments, TrainingFlag)[:1]:
        new_module.train(flag == 1)


def erase_unused(graph_module: GraphModule) -> None:
    """Erase operations whose result is not used. Modules stay, and so do checks.

    Args:
        graph_module: The graph module.
    """
    graph = graph_module.graph
    for node in reversed(list(graph.nodes)):
        erasable = node.op in (*OPERATION, "get_attr") and node.target not in CHECKS
        if erasable and not node.users:
            graph.erase_node(node)
