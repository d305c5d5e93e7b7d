"""What every recipe must get right and can easily get silently wrong.

Where to change what. Each room and file imports only from those below it; a test reads this list.

    cli                 from a command line to a running recipe
    parse               the words of a command line as options
    run/                one run: between two steps, and in its folder
      micro_batches     the parts of a rank's batch in each step of DDP
      loop              between two steps: --log-every, save, stop, resume
      best              the best epoch: best.pt, --best-by, --patience
      optimizer_steps   what the optimizers of a changed loop really update
      options           --output-dir, --resume, --keep-snapshots, how long ranks wait: --timeout-s
      plan              batch sizes, steps and rates: decided and refused once
      parts             the loaders and the model of a run
      begin             start: logs, seed, devices, the first line, process group, folder
      check             --check
      folder            what a run writes: config, manifest, metrics.jsonl, summary, model.pt
      claim             which folder a run may write into; the names of its files
      curves            TensorBoard
    training/           what is trained
      models            models by name, weights to begin with, freezing
      optimizer         options of length, batch size and rate; optimizer, --clip-grad-norm
      ddp               around DistributedDataParallel: accumulation, bf16 gradients, SyncBatchNorm
      virtual_ranks     the same bits on any number of processes
      evaluation        metrics over every validation sample once; a loss that explodes
      losses            --class-weights; what a changed loop's loss was computed from
    data/               samples and batches
      loaders           the DataLoader's options; from a data set to a rank's batches
      datasets          digits, photos, Fashion-MNIST, CIFAR-10, fake data; augmentation
      packed            photos in a few tar files, read by index, copied to each host's own disk
      image_folder      which photos are in a folder; which of them validate
      decode            a photo as a tensor: decoded, checked, cut out
      array_file        arrays that all processes map
      workers           --num-workers: by the cores, by the room in /dev/shm, measured, or kept
      stream            which samples form which batch, in which order
      same_samples      whether all ranks read the same samples, each time they read them
      broken            what is said of a sample that cannot be read or fits no batch
      batches           batches on the device, copied ahead of time
      batch_wait        how long a rank waits for a batch, and how it is stopped meanwhile
    downloads           --download of the flower photos and of weights (of other data: datasets)
    snapshots/          the training state on the disk
      state             what a snapshot holds; how it is loaded, also on more or fewer ranks
      snapshot_files    writing, finding, checking and deleting snapshots; their format
      shards            tensors that are divided between ranks
    weights             hash and saving of a state_dict
    manifest            what a run records of its ranks, seed, machine, code and libraries
    identity            options that decide a run's numbers; --resume of another run is refused
    replicas            do all ranks hold the same bits?
    profile             --profile: torch's profiler over a few steps
    throughput          speed of training and of loading; memory; how busy the GPUs are
    seeds               random generators and their states, determinism, TF32, bf16, fp16
    trace               a hash of everything that one step computes (reproduce --trace-step)
    kernels             --portable: the same bits on every x86-64 CPU
    fingerprint         small operations that show whether two machines compute the same bits
    group/              the ranks together
      process_group     joined by all ranks
      rendezvous        how the ranks find each other, or hear why they cannot; who is missing
      stop              all ranks stop after the same step
      collectives       what ranks tell each other besides gradients; errors on which all agree
      devices           which GPU or CPU; gloo or nccl
      interfaces        the network interface that leads to the other ranks
    terminal            what rank 0 shows: lines, tables, progress bars
    restart             --restarts, --shrink
    launch/             starting ranks
      start             start them, wait, end them all once one fails
      process           being a rank: how it ends, what it forks
      report            which of several failures is shown, with which exit status
      ranks             who am I? The variables of every launcher
      port              the address and port on which rank 0 listens
      capacity          how many ranks fit this machine; the CPU cores of this process
    watch/              runs that watch themselves
      advice            what would make a run faster
      stragglers        which rank is slow
      clock             where the time goes: data, compute, waiting, saving, evaluation
      record            where each rank is while it makes no step
      verdict           which rank hangs, and in which collective
    hints               advice for errors of PyTorch, NCCL and CUDA; options as others spell them
    run_status          status.json: whether a run goes on, or how it ended
    stack               which versions of torch, CUDA and NCCL belong together
    git                 changed files and their diff, without secrets
    masking             what is hidden in texts: secrets; control characters in names from data
    option_rules        which options may change on a resume, or are new; least values
    output_folder       --output-dir: made, or why it cannot be
    reading             JSON and folders that are read, or closed to this user
    figure              plots, as PNG
    writing             a file is written completely or not at all, or an error says why
    owner               one run per folder: who owns it, and whether it is still the run's
    errors              the ways a run ends, their exit statuses; the signals that stop a run

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
