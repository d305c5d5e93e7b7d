"""What a rank's process forks."""

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from time import sleep

import pytest

from common.launch import process
from common.launch.start import interrupts_held
from tests.helpers.commands import ROOT, clean_env
from tests.helpers.pool import PATIENCE_S


def test_a_fork_waits_until_the_other_threads_sleep() -> None:
    """One of them may hold the interpreter's lock, which the child would inherit as taken."""
    size = 2**28
    block, libc = ctypes.create_string_buffer(size), ctypes.CDLL(None)

    def fill(_argument: None) -> None:
        libc.memset(block, 1, ctypes.c_size_t(size))  # without the GIL

    start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(fill)
    thread = ctypes.c_ulong()  # of C, as gloo's: `threading` does not know it
    assert libc.pthread_create(ctypes.byref(thread), None, start, None) == 0
    while block[0] != b"\1":
        sleep(0)
    process._let_threads_sleep(PATIENCE_S)
    assert block[size - 1] == b"\1"
    assert libc.pthread_join(thread, None) == 0


def test_a_fork_waits_for_no_thread_that_python_knows() -> None:
    """Such as the one that writes a snapshot, for minutes."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(2**24))

    thread = threading.Thread(target=compute)
    thread.start()
    process._let_threads_sleep(at_most_s=1e9)  # else it would not return
    stop.set()
    thread.join()


RANK = """
import multiprocessing, sys
from common.launch import process
from common.launch.start import interrupts_held
from common.launch.ranks import Ranks
sys.version_info = tuple(map(int, sys.argv[1].split(".")))
process._let_threads_sleep = lambda: print("waits", flush=True)
def fork():
    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()
    child.join()
sys.exit(process.run_rank(fork, Ranks()))
"""


@pytest.mark.parametrize(("version", "waits"), [("3.11.2", True), ("3.11.10", False)])
def test_ranks_of_old_pythons_fork_so(version: str, *, waits: bool) -> None:
    command = [sys.executable, "-c", RANK, version]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(), check=True, text=True, stdout=subprocess.PIPE
    )
    assert done.stdout == "waits\n" * waits


PROGRAM = """
import multiprocessing, signal, sys, threading, time
from common.launch import process
from common.launch.start import interrupts_held
from common.launch.ranks import Ranks
"""
POOL = """
def own_code():
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a training loop notes it
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    child.start()
    child.terminate()  # so does multiprocessing.Pool at its end
    child.join()
    print(child.exitcode)
process.end_process(process.run_rank(own_code, Ranks()))
"""
THREAD = """
threading.Thread(target=time.sleep, args=(3600,), name="upload").start()
process._THREADS_S = 0.1
process.end_process(process.run_rank(lambda: None, Ranks()))
"""


def test_a_process_that_own_code_forks_can_be_ended_by_a_signal() -> None:
    assert own_program(POOL).stdout == "-15\n"


def test_a_thread_that_does_not_end_is_named_and_holds_no_finished_run() -> None:
    done = own_program(THREAD)
    assert done.returncode == 0
    assert re.search(r"ended without the thread upload, at \S+:\d+: give it daemon=", done.stderr)


def own_program(code: str) -> "subprocess.CompletedProcess[str]":
    """A new process, whose threads and children would hold this one."""
    command = [sys.executable, "-c", PROGRAM + code]
    return subprocess.run(
        command, cwd=ROOT, env=clean_env(), text=True, capture_output=True, timeout=PATIENCE_S
    )


def test_nothing_forks_once_cuda_may_have_begun() -> None:
    """A fork could not use it. Each place that forks says why its child has no need to."""
    spawned = r'(?!1, get_context\("spawn"\))'
    forks = re.compile(rf'"fork"|os\.fork\(|ProcessPoolExecutor\({spawned}|multiprocessing\.P')
    rooms = ("common", "tools", "recipes", "benchmarks")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    assert {str(f.relative_to(ROOT)) for f in files if forks.search(f.read_text())} == {
        "common/data/loaders.py",  # the children load samples, which are on the CPU
        "recipes/checkpoint_rnn/plan.py",  # in a new process, to train on a CPU
    }, "use spawn"


def test_ctrl_c_that_another_thread_gets_is_held_until_the_ranks_are_started() -> None:
    """The main thread blocks the signal, so the kernel gives it to one that does not."""
    done, started = threading.Event(), list[bool]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores it

    def start() -> None:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            sleep(0.5)  # so long, Python would have raised it here
            started.append(True)
        sleep(60)  # on a busy machine the other thread gets it only now

    thread = threading.Thread(target=done.wait)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        start()
    done.set()
    thread.join()
    assert started
    assert signal.signal(signal.SIGINT, before) == signal.default_int_handler
