"""Ranks that outlive a test: starting Python and importing torch costs more than most laws."""

import contextlib
import faulthandler
import io
import os
import signal
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest
import torch
from torch import multiprocessing

from common.group.process_group import process_group
from common.kernels import choose_kernels
from common.launch.process import fork_while_threads_sleep
from common.launch.ranks import Ranks
from tests.helpers.machine import free_port

PATIENCE_S = 480
"""How long a test waits for anything. It only ends a hang: eight times as long as a busy machine
needs, and less than the 600 s of --timeout-s, so a command that waits so long fails its test."""

LONG_PATIENCE_S = 1500
"""For a command that must succeed and computes for two minutes or more on idle cores."""

STACK = signal.SIGRTMIN
"""Lets a rank write its stack. A recipe has a use of its own for the usual ones."""


class Pool:
    """Processes that each run a function as one rank of a world, and then wait for the next."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """`function(ranks, *args)` on `world_size` ranks; their results in rank order.

        Raises what the first rank raised.
        """
        port = free_port()
        if not all(process.is_alive() for process in self.processes):
            self.replace()
        for rank in range(world_size):
            ranks = Ranks(rank, rank, world_size, world_size, "test", "127.0.0.1", port)
            self.connections[rank].send((function, ranks, args))
        waiting = {self.connections[rank]: rank for rank in range(world_size)}
        answers: dict[int, tuple[Any, Exception | None]] = {}
        why = ""
        while waiting and not why:
            ready = wait([*waiting], PATIENCE_S)
            if not ready:
                why = f"{PATIENCE_S} s have passed; the ranks' stacks are on stderr"
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[waiting[connection]] = connection.recv()
                    del waiting[connection]
                except (EOFError, ConnectionError):
                    why = f"rank {waiting[connection]} died"
        errors = [error for _, (_, error) in sorted(answers.items()) if error is not None]
        if why:
            self.replace()
            notes = "\n".join(note for error in errors for note in getattr(error, "__notes__", ()))
            pytest.fail(f"no answer of ranks {sorted(waiting.values())}: {why}\n{notes}")
        for error in errors:
            raise error
        return [answers[rank][0] for rank in range(world_size)]

    def replace(self) -> None:
        """Other processes instead of those that hang, for the next tests; say where they were."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid or 0, STACK)
        time.sleep(5)  # they write their stacks
        for process in self.processes:
            process.kill()
        self.close()
        self.start()

    def close(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def in_group(ranks: Ranks, function: Callable[..., Any], *args: Any) -> Any:
    """`function(ranks, *args)` inside a gloo process group."""
    try:
        with process_group(ranks, torch.device("cpu"), "gloo", PATIENCE_S / 2):
            return function(ranks, *args)
    finally:
        if torch.distributed.is_initialized():  # a failed rank leaves its group as it is
            torch.distributed.destroy_process_group()


def call_main(_ranks: Ranks, name: str, arguments: list[str]) -> tuple[int, str, str]:
    """A recipe's own main() in a warm process: its exit status, stdout and stderr."""
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        status = import_module(f"recipes.{name}.train").main(arguments)
    return status, told.getvalue(), said.getvalue()


def call_tool(ranks: Ranks, name: str, arguments: list[str]) -> tuple[int, str, str]:
    """A command of `tools` in a warm process, as `call_main`."""
    tool, told, said = import_module(name), io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(said),
        pytest.MonkeyPatch.context() as patch,
    ):
        if hasattr(tool, "resolve"):
            patch.setattr(tool, "resolve", lambda: ranks)
        status = tool.main(arguments)
    return status, told.getvalue(), said.getvalue()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    choose_kernels(portable=True)
    fork_while_threads_sleep()
    faulthandler.register(STACK)
    while True:
        try:
            function, ranks, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(ranks, *args), None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            connection.send((None, error))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
