"""`--segments auto`: measure training steps, and take the fastest number of segments that fits.

No formula knows the time that an allocator, a cache or a GPU's idle units take, so whole steps are
measured, from the root of the length outwards: more segments while that gains anything, fewer while
they may fit. Each number gets a process of its own, forked before anything was trained (a GPU's
allocator needs none), because memory that a process has freed still counts as resident.
"""

import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from common import cli
from common.errors import InputError, TrainingError
from common.files import mebibytes, write_json
from common.group.devices import synchronize
from common.launch.fresh import run_fresh
from common.measure import PeakMemory
from common.run.options import as_arguments
from common.seeds import seed_everything, set_determinism
from recipes.checkpoint_rnn.adding import AddingRNN, make_data
from recipes.checkpoint_rnn.train import NAME, Config, train_step

log = logging.getLogger("recipes")

MARGIN = 1.15
"""Measured memory varies and creeps up over the steps: this much is kept free."""


def choose_segments(config: Config, device: torch.device, folder: Path) -> int:
    """The fastest of the numbers tried that keeps to the budget, remembered in the run's folder.

    Args:
        config: with a memory budget.
        device: that training will use.
        folder: of the run; what was chosen there once is kept, because it decides the bits.

    Raises:
        InputError: a budget that no number meets; the smallest that can be met is named.
    """
    remembered = folder / "segments.json"
    if remembered.is_file():
        return int(json.loads(remembered.read_text())["segments"])
    budget = config.checkpoint.memory_budget
    assert budget is not None
    log.info("measuring segments ...")
    plain = replace(config, checkpoint=replace(config.checkpoint, segments=1, memory_budget=None))
    leave_out = {"output_dir", "resume", "device"}
    arguments = [*as_arguments(plain, leave_out), "--device", device.type]
    found = json.loads(run_fresh("recipes.checkpoint_rnn.plan", [str(budget), *arguments]))
    for entry in found:
        log.info(
            f"  {entry['segments']:>5} segments: {mebibytes(entry['bytes'])}, "
            f"{entry['step_s']:.2f} s a step"
        )
    fitting = [entry for entry in found if MARGIN * entry["bytes"] <= budget]
    if not found:
        raise InputError(
            "not even the root of the length as --segments fits into the memory that "
            "this process may use: try a smaller batch"
        )
    if not fitting:
        least = int(MARGIN * min(entry["bytes"] for entry in found)) + 1
        raise InputError(
            f"--memory-budget {budget} cannot be met by any number of segments: the smallest "
            f"that can is about {least} ({mebibytes(least)})"
        )
    best = min(fitting, key=lambda entry: entry["step_s"])
    log.info(f"chosen: {best['segments']} segments, the fastest within {mebibytes(budget)}")
    write_json(remembered, best)
    return int(best["segments"])


def search(length: int, budget: int, probe: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Measure numbers of segments, and return those that did not run out of memory.

    Args:
        length: of the sequence [time steps].
        budget: fewer segments are tried only while they may be within it [bytes].
        probe: segments to (bytes, seconds) of a step; None where memory ran out.
    """
    found: dict[int, tuple[int, float]] = {}

    def try_(segments: int) -> bool:
        result = probe(segments)
        if result is not None:
            found[segments] = result
        return result is not None

    start = math.isqrt(length)
    segments = start
    try_(start)
    while segments < length:  # shorter segments: slower by their number, but perhaps they fit
        before, segments = segments, min(2 * segments, length)
        if not try_(segments):
            break
        if before in found and all(
            a >= b for a, b in zip(found[segments], found[before], strict=True)
        ):
            break
    segments = start
    while segments in found and segments > 1 and found[segments][0] <= budget:
        segments //= 2  # at most twice the memory
        try_(segments)
    return [
        {"segments": number, "bytes": found[number][0], "step_s": found[number][1]}
        for number in sorted(found)
    ]


def probe_step(config: Config, device: torch.device, segments: int) -> Any:
    """Bytes above the start, and seconds of the faster of two training steps."""
    seed_everything(config.run.seed)
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    data = make_data(config.sequence, config.run.seed)
    model = AddingRNN(config.network, config.sequence).to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters())
    memory, times = PeakMemory(device), []
    batch_size = config.optimizer.total_batch_size(1)
    try:
        for step in range(2):
            start_s = time.perf_counter()
            keys = [(step, index) for index in range(batch_size)]
            sequences, _ = default_collate([data.train[key] for key in keys])
            train_step(model, optimizer, sequences.to(device, dtype), segments)
            synchronize(device)
            times.append(time.perf_counter() - start_s)
    except (MemoryError, RuntimeError) as error:  # torch's CPU allocator raises RuntimeError
        if (
            not isinstance(error, MemoryError)
            and "alloc" not in str(error)
            and "memory" not in str(error)
        ):
            raise
        return None
    return memory.above_start(), min(times)


def forked(function: Callable[[], Any]) -> Any:
    """The result of a function that ran in a fork of this process; None where that was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(function(), pipe)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, ended = os.waitpid(child, 0)
    if ended and not os.WIFSIGNALED(ended):
        raise TrainingError("measuring a step failed; what it said is above")
    return json.loads(text) if text else None


def main() -> None:
    """Print predictions as JSON: python -m recipes.checkpoint_rnn.plan BUDGET [options]."""
    budget, *arguments = sys.argv[1:]
    _, config = cli.parse(NAME, Config, arguments)
    set_determinism(**config.run.determinism)
    device = torch.device(config.run.device)

    def probe(segments: int) -> Any:
        if device.type == "cpu":
            return forked(lambda: probe_step(config, device, segments))
        return probe_step(config, device, segments)

    print(json.dumps(search(config.sequence.length, int(budget), probe)))


if __name__ == "__main__":
    main()
