"""What the fault matrix changes inside a rank; Python imports this file at start.

FAULT names what happens once, on rank FAULT_RANK after step FAULT_STEP. The file FAULT_MARK then
records that it has happened. `common.run.loop` is changed, when it is imported.

Rank SLOW_RANK sleeps SLOW_S in each step: after the optimizer's step, or with SLOW_BEFORE before
it, when all gradients are there.

KILLS has the steps after each of which that rank kills itself once: the first at the beginning of
the next step, the second after a tenth of a step's time, and so on.
The file DEVICES holds how many devices there are: a rank beyond them dies at its start, which
stands in for a device that does not come back.
EVALUATION_S is how long a batch of an evaluation takes, IMAGE_S how long the check of an image;
the file SEEN gets a byte for each.
GATES is a folder. A rank waits after a step as long as the folder holds a file with the step's
number, and in an evaluation or the check of images as long as it holds the file `seen`.
No batch is made as long as the file STALLED exists: from the fourth one of each process on.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

from tools.on_import import OnImport


def happen(loop: Any, losses: Any) -> None:
    """Do what FAULT names."""
    import ctypes
    import multiprocessing
    import resource

    import torch
    import torch.distributed as dist

    fault = os.environ["FAULT"]
    if fault == "raises":
        raise RuntimeError("a bug of this test")
    if fault == "exits":
        os._exit(7)
    if fault.startswith("exits as if"):
        os._exit(75 if "stop" in fault else 0)
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stops answering":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleeps for ever":
        time.sleep(1e6)
    if fault == "hangs in data loading":
        type(loop.data.train).__getitems__ = lambda *_: time.sleep(1e6)
    if fault == "keeps the GIL for ever":
        for mutex in [ctypes.create_string_buffer(64)] * 2:  # a second lock of it never returns
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    if fault == "waits in another collective":
        dist.broadcast(torch.zeros(3), src=0)
    if fault == "runs out of memory":
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
        torch.zeros(2**30)
    if fault == "loses a loading process":
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    if fault == "calls another collective":
        dist.all_reduce(torch.zeros(3))
    if fault == "leaves a parameter out":
        loop.state.parts["model"].fc.forward = lambda x: x[:, :10]
    if fault == "has a loss that is not finite":
        losses.fill_(float("inf"))
    if fault.startswith("flips a bit of a "):
        from tests.helpers.flips import plant

        plant(loop, fault.split()[5].strip(","))
    if fault == "sees the clock go back":
        now = time.time
        time.time = lambda: now() - 3600


def patch(module: Any) -> None:
    """Make `after_step` cause the fault."""
    after_step = module.Loop.after_step

    def changed(self: Any, losses: Any) -> None:
        losses = losses.detach().clone()
        time.sleep(float(os.environ.get("STEP_S", 0)))
        slow = "SLOW_BEFORE" not in os.environ
        if slow and self.run.ranks.rank == int(os.environ.get("SLOW_RANK", -1)):
            time.sleep(float(os.environ["SLOW_S"]))
        mark = Path(os.environ.get("FAULT_MARK", "/"))
        due = self.state.step + 1 == int(os.environ.get("FAULT_STEP", 0))
        rank = int(os.environ.get("FAULT_RANK", 1))
        if due and self.run.ranks.rank == rank and not mark.exists():
            mark.touch()
            happen(self, losses)
        after_step(self, losses)

    module.Loop.after_step = changed


def sleep_before_the_optimizer(_module: Any) -> None:
    """Let rank SLOW_RANK sleep between the last gradient and the optimizer's step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if os.environ["RANK"] == os.environ["SLOW_RANK"]:
        slow_s = float(os.environ["SLOW_S"])
        register_optimizer_step_pre_hook(lambda *_: time.sleep(slow_s))


def wait_at(gate: str) -> None:
    """Wait until the test has deleted that file."""
    while "GATES" in os.environ and Path(os.environ["GATES"], gate).exists():
        time.sleep(0.01)


def patch_gates(module: Any) -> None:
    """Let a test decide when training goes on."""
    after_step = module.Loop.after_step

    def changed(self: Any, losses: Any) -> None:
        after_step(self, losses)
        wait_at(str(self.state.step))

    module.Loop.after_step = changed


def patch_kills(module: Any) -> None:
    """Kill this rank after some of its steps, at one tenth of a step's time after another."""
    after_step = module.Loop.after_step
    steps = [int(step) for step in os.environ["KILLS"].split()]
    done_s: list[float] = []

    def changed(self: Any, losses: Any) -> None:
        after_step(self, losses)
        done_s.append(time.monotonic())
        mark = Path(f"{os.environ['FAULT_MARK']}{self.state.step}")
        if self.run.ranks.rank != int(os.environ.get("FAULT_RANK", 1)) or mark.exists():
            return
        if self.state.step in steps:
            tenths = steps.index(self.state.step) % 10
            usual_s = done_s[-1] - done_s[-2] if len(done_s) > 1 else 0.005
            mark.touch()
            kill = threading.Timer(usual_s * tenths / 10, os.kill, (os.getpid(), signal.SIGKILL))
            kill.start()

    module.Loop.after_step = changed


def patch_samples(module: Any) -> None:
    """Let no process make more than three batches as long as the file STALLED exists."""
    from common.data import batch_wait

    own, made = module.ArraySamples.__getitems__, []

    def stalled(self: Any, keys: Any) -> Any:
        made.extend(batch_wait._current)  # none before the first epoch begins
        while len(made) > 3 and Path(os.environ["STALLED"]).exists():
            time.sleep(0.01)
        return own(self, keys)

    module.ArraySamples.__getitems__ = stalled


class Slowly:
    """Batches that take as long as those of a large data set."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            see("EVALUATION_S")
            yield batch


def see(name: str) -> None:
    """Leave a byte, and take that many seconds."""
    with Path(os.environ["SEEN"]).open("a") as file:
        file.write("x")
    wait_at("seen")
    time.sleep(float(os.environ[name]))


def patch_evaluation(module: Any) -> None:
    """Make an evaluation slow."""
    own = module.evaluate
    module.evaluate = lambda model, batches, *rest: own(model, Slowly(batches), *rest)


def patch_images(module: Any) -> None:
    """Make the check of images slow."""
    own = module.image_fault

    def slow(*image: Any) -> Any:
        see("IMAGE_S")
        return own(*image)

    module.image_fault = slow


if "FAULT_STEP" in os.environ or "STEP_S" in os.environ:
    OnImport("common.run.loop", patch)
if "SLOW_BEFORE" in os.environ and "RANK" in os.environ:
    OnImport("common.run.loop", sleep_before_the_optimizer)
if "GATES" in os.environ:
    OnImport("common.run.loop", patch_gates)
if "STALLED" in os.environ:
    OnImport("common.data.datasets", patch_samples)
if "KILLS" in os.environ:
    OnImport("common.run.loop", patch_kills)
if "EVALUATION_S" in os.environ:
    OnImport("common.training.evaluation", patch_evaluation)
if "IMAGE_S" in os.environ:
    OnImport("common.data.decode", patch_images)
devices = os.environ.get("DEVICES")
if devices and int(os.environ.get("LOCAL_RANK", -1)) >= int(Path(devices).read_text()):
    os.kill(os.getpid(), signal.SIGKILL)
