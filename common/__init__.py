"""What every recipe must get right and can easily get silently wrong.

One room per question; imports point down this list only (tests/test_house.py):

    cli, parse          from a command line to a running recipe; its words as options
    run/                the loop between two steps; a run's folder
    snapshots/          the training state on the disk, whole or in shards; resume
    data/  training/    samples and batches; model, optimizer, gradients, evaluation
    replicas            do all ranks hold and compute the same bits?
    throughput          speed of training and of loading; memory
    identity            options that decide a run's numbers
    manifest            what it takes to say that two runs were the same
    group/              devices, the rendezvous of the ranks, what they tell each other
    terminal            what rank 0 shows: lines and progress bars
    restart             ranks that failed, started again
    launch/             who am I; start, end and explain ranks
    watch/              which rank hangs, and where; which rank is slow
    hints               advice for the errors of PyTorch, NCCL and CUDA
    machine, git, stack what is recorded of this machine and the code; versions of CUDA and NCCL
    driver              how many GPUs there are, and why the driver cannot use them
    files, options      files and folders; options that change no number
    unused_options      options without effect on the chosen data, model or device
    downloads           public data and weights that --download gets
    figure, seeds       figures; randomness, determinism and precision
    writing             a file is written completely or not at all, or an error says why
    owner               one run per folder, and whether the folder is still the run's
    errors              the ways in which a run ends

How to add a recipe, a data set or a launcher: CONTRIBUTING.md.
"""

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, or the part of it that was copied into the image."""

log = logging.getLogger("recipes")
"""What rank 0 shows and every rank keeps in its log, once `common.terminal` has set it up."""


closed_streams: set[str] = set()
"""The standard streams that were closed when this process began, by name."""


def _open_closed_streams() -> None:
    """Open /dev/null where a standard stream is closed, as a daemon's are: `>&- 2>&-`.

    Else the next file or socket gets its number, and receives what a library writes to stderr.
    It happens here because every program of this project imports `common` first.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            closed_streams.add(name)
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this
            os.set_inheritable(opened, True)  # the ranks need it, too
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            stream = os.fdopen(opened, "w" if number else "r", errors="backslashreplace")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


_open_closed_streams()
