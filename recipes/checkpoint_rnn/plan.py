"""`--segments auto`: measure training steps, and take the fastest number of segments that fits.

No formula knows the time of an allocator, a cache or an idle GPU, so whole steps are measured. The
search begins at the square root of the length. It tries more segments while they gain anything, and
fewer while they may fit. Each number is measured in a process of its own: on a CPU, freed memory
still counts as resident; on a GPU, cuBLAS would take its memory for the first number only.
"""

import math
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from common import log
from common.data.batches import DeviceBatches
from common.errors import STOP_SIGNALS, InputError, TrainingError
from common.group.devices import synchronize
from common.launch.process import end_with_parent
from common.reading import read_json
from common.run.options import RunOptions
from common.seeds import mixed_precision, seed_everything, set_determinism
from common.terminal import mebibytes
from common.writing import write_json
from recipes.checkpoint_rnn.adding import (
    AddingRNN,
    RecurrentOptions,
    SequenceOptions,
    make_data,
    train_step,
)
from recipes.checkpoint_rnn.memory import PeakMemory

MARGIN = 1.15
"""Share of the budget that a number may use is 1 / MARGIN: memory varies and grows over steps."""


def choose_segments(
    sequence: SequenceOptions,
    network: RecurrentOptions,
    run: RunOptions,
    batch_size: int,
    budget: int,
    device: torch.device,
    folder: Path,
) -> int:
    """The fastest measured number of segments within the budget.

    Args:
        sequence: with the length to cut.
        network: that is trained.
        run: seed, precision and determinism.
        batch_size: samples per step.
        budget: for training, above what the process holds before it [bytes].
        device: that training uses.
        folder: of the run. It keeps the choice, because the choice decides the bits.

    Raises:
        InputError: no number meets the budget; the message names the smallest possible budget.
    """
    remembered = folder / "segments.json"
    if remembered.is_file():
        return int(read_json(remembered, "segments")["segments"])
    log.info("measuring segments ...")
    measure = partial(step_cost, sequence, network, run, batch_size, device)
    # CUDA cannot be used after a fork. `search`, which forks, is in a new process without CUDA.
    how = "fork" if device.type == "cpu" else "spawn"
    measure = partial(in_new_process, how, measure)
    found = in_new_process("spawn", search, sequence.length, budget, measure)
    if not found:
        raise InputError(
            "one training step needs more memory than this process may use, even with the square "
            "root of the length as --segments: try a smaller batch"
        )
    for entry in found:
        log.info(
            f"  {entry['segments']:>5} segments: {mebibytes(entry['bytes'])}, "
            f"{entry['step_s']:.2f} s per step"
        )
    fitting = [entry for entry in found if MARGIN * entry["bytes"] <= budget]
    if not fitting:
        least = int(MARGIN * min(entry["bytes"] for entry in found)) + 1
        raise InputError(
            f"--memory-budget {budget} cannot be met by any number of segments: give about "
            f"{least} ({mebibytes(least)}) or more"
        )
    best = min(fitting, key=lambda entry: entry["step_s"])
    log.info(f"chosen: {best['segments']} segments, the fastest within {mebibytes(budget)}")
    write_json(remembered, best)
    return int(best["segments"])


def search(
    length: int, budget: int, measure: Callable[[int], tuple[int, float] | None]
) -> list[dict[str, Any]]:
    """Measure several numbers of segments; returns those that did not run out of memory.

    Args:
        length: of the sequence [time steps].
        budget: fewer segments are tried only while they may fit it [bytes].
        measure: segments to (bytes, seconds) of a step, or None where memory ran out.
    """
    found: dict[int, tuple[int, float]] = {}

    def try_(segments: int) -> bool:
        result = measure(segments)
        if result is not None:
            found[segments] = result
        return result is not None

    start = math.isqrt(length)
    segments = start
    try_(start)
    while segments < length:  # more segments are slower, but may fit
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


def step_cost(
    sequence: SequenceOptions,
    network: RecurrentOptions,
    run: RunOptions,
    batch_size: int,
    device: torch.device,
    segments: int,
) -> tuple[int, float] | None:
    """Memory and time of the faster of two training steps [bytes, s]; None if memory ran out."""
    set_determinism(**run.determinism)
    seed_everything(run.seed)
    dtype, _, _ = mixed_precision(run.precision, device)
    data = make_data(sequence, run.seed)
    model = AddingRNN(network, sequence).to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    memory, times = PeakMemory(device), []
    keys = ([(step, index) for index in range(batch_size)] for step in range(2))
    batches = DeviceBatches(map(data.train.__getitems__, keys), device, dtype)
    try:
        start_s = time.perf_counter()
        for sequences in batches:  # as in training: on a GPU, the next batch is there, too
            train_step(model, optimizer, sequences, segments)
            synchronize(device)
            times.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
    except MemoryError:
        return None
    except RuntimeError as error:  # which torch's allocators raise
        if re.search("alloc|out of memory", str(error), re.I):  # not "an illegal memory access"
            return None
        raise
    return memory.above_start(), min(times)


def in_new_process(start_method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a child process; returns None if the kernel killed the child.

    Args:
        start_method: of multiprocessing. spawn: a new interpreter; fork: a copy of this process.
        function: to call.
        arguments: for it.

    Raises:
        TrainingError: the function failed; its traceback is on stderr.
    """
    context: Any = get_context(start_method)
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(os.getpid(), writing, function, *arguments))
    child.start()
    writing.close()
    try:
        result = reading.recv()
    except EOFError:
        result = None
    child.join()
    if child.exitcode > 0:
        raise TrainingError("measuring a step failed; its traceback is above")
    return result


def _answer(parent: int, pipe: Any, function: Callable[..., Any], *arguments: Any) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it ended before the line above
        return
    for number in (signal.SIGINT, *STOP_SIGNALS):  # the parent ends, and then this process does
        signal.signal(number, signal.SIG_IGN)
    pipe.send(function(*arguments))
