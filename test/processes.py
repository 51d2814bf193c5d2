"""Processes that share work, for tests of what they compute together.

They start when a test asks for them first, and wait for what is asked next.
"""

import atexit
import pickle
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Iterator, List, Tuple

import pytest
import torch
from torch import distributed, multiprocessing

HOST, MOST = "127.0.0.1", 3
FREE = b"free"  # what a process says that has left its last group
PATIENCE = 180.0  # seconds, to start or to meet
LEAVING = 20.0  # seconds; gloo of PyTorch 2.5 at times does not end
NAMES = count()

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)


_GROUPS: List[Any] = []  # that a process was alone in


@contextmanager
def alone() -> Iterator[None]:
    """Make a group of this process alone, and leave it.

    It is kept alive: where it ends, PyTorch waits for a thread that may wait for the
    interpreter, which does not go on meanwhile.

    Yields:
        Nothing.
    """
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _GROUPS.append(distributed.group.WORLD)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class DidNotMeetError(Exception):
    """Processes did not come together, whatever they were asked for."""


def _serve(rank: int, port: int, pipe: Connection) -> None:
    """Do what is asked for, in a group of as many processes as are asked for."""
    torch.set_num_threads(1)
    store = distributed.TCPStore(HOST, port, is_master=False)
    with suppress(EOFError):
        while True:
            pipe.send_bytes(FREE)
            name, world, function, args = pipe.recv()
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore(name, store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=PATIENCE),
            )
            try:
                answer = True, function(rank, *args)
            except BaseException:  # noqa: B036, those of pytest are no exceptions
                answer = False, traceback.format_exc()
            # tensors by their numbers: what is shared would need this process
            pipe.send_bytes(pickle.dumps(answer))
            distributed.destroy_process_group()


@lru_cache(maxsize=None)
def _start() -> Tuple[Callable[[], None], Any, List[Connection]]:
    """Start the processes; return what ends them, where they meet, how to ask them."""
    # where processes meet outlives each of their groups
    store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    # where there is a server to fork them, PyTorch is loaded once
    is_served = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if is_served else "spawn")
    if is_served:
        context.set_forkserver_preload(["torch", "backpack.extensions"])
    pipes = [context.Pipe() for _ in range(MOST)]
    processes = [
        context.Process(target=_serve, args=(rank, store.port, pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process, (_, pipe) in zip(processes, pipes):
        process.start()
        pipe.close()  # so that a process that dies is noticed

    def stop() -> None:
        for process in processes:
            process.terminate()
            process.join()

    atexit.register(stop)
    for pipe, _ in pipes:
        pipe.poll(PATIENCE)
    return stop, store, [pipe for pipe, _ in pipes]


def _end() -> None:
    """End the processes; they are started anew when they are needed."""
    stop, _, _ = _start()
    stop()
    _start.cache_clear()


def _ask(world: int, function: Callable[..., Any], args: Tuple) -> List[Any]:
    """Call a function in several processes that have left their former group."""
    _, _, pipes = _start()
    waiting = {pipe: rank for rank, pipe in enumerate(pipes[:world])}
    for pipe in waiting:
        if not pipe.poll(LEAVING):
            raise DidNotMeetError("A process does not leave its former group.")
        pipe.recv_bytes()
    name = str(next(NAMES))
    for pipe in waiting:
        pipe.send((name, world, function, args))
    answers: List[Any] = [None] * world
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)
            try:
                right, answers[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError as error:
                raise DidNotMeetError(f"Process {rank} has ended.") from error
            if not right:
                raise RuntimeError(f"Process {rank}: {answers[rank]}")
    return answers


@lru_cache(maxsize=None)
def in_processes(world: int, function: Callable[..., Any], *args: Any) -> List[Any]:
    """Call a function in several processes.

    Processes that do not come together are asked once more, newly started.

    Args:
        world: How many.
        function: Function of a process' number and ``args``, which can be pickled.
        args: Further arguments.

    Returns:
        What each process returns; the same objects every time.

    Raises:
        RuntimeError: If one of them fails. All are ended, and start anew next time.
        DidNotMeetError: If they did not come together twice.
    """
    try:
        try:
            return _ask(world, function, args)
        except DidNotMeetError:
            _end()
            return _ask(world, function, args)
    except BaseException:
        _end()
        raise
