"""What takes two GPUs: each has a process over NCCL (on CPUs: gloo, to try the script)."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu_check.check import Check, Found, Part, descendants, largest_difference

TWO = ("--nproc", "2")


def few(check: Check) -> tuple[str, ...]:
    """Some steps on a small ResNet, with every loss."""
    steps = "30" if check.cuda else "6"
    model = ("--data", "fake", "--model", "resnet18", "--global-batch-size", "64")
    return (*model, "--epochs", "3", "--log-every", "1", "--max-steps", steps)


def overlap(check: Check) -> Found:
    """NCCL's kernels run while the backward pass computes; the profile says for how long."""
    size = ("224", "128", "30") if check.cuda else ("32", "16", "12")
    names = ("--image-size", "--global-batch-size", "--max-steps")
    options = [part for pair in zip(names, size, strict=True) for part in pair]
    options += ["--data", "fake", "--model", "resnet50", "--epochs", "5", "--profile", "4"]
    check.run("profiled", *TWO, *options)
    trace = json.loads((check.folder / "profiled" / "profile" / "rank_0.json").read_text())
    times = kernels(trace["traceEvents"])
    sent = sum(end - start for start, end in times["nccl"])
    hidden = sum(covered(one, times["other"]) for one in times["nccl"])
    share = hidden / sent if sent else None
    holds = not check.cuda or (share is not None and share > 0.3)
    return {"holds": holds, "nccl_us": sent, "share_while_others_compute": share}


def kernels(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """When NCCL's kernels and the others ran; the others without overlap, in their order [us]."""
    found: dict[str, list[tuple[float, float]]] = {"nccl": [], "other": []}
    for event in sorted(events, key=lambda one: float(one.get("ts", 0))):
        if event.get("cat") == "kernel":
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            times = found["nccl" if "nccl" in event["name"].lower() else "other"]
            start = max(start, times[-1][1]) if times else start
            if start < end:
                times.append((start, end))
    return found


def covered(one: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a time lies within others [us]."""
    return sum(max(0.0, min(one[1], end) - max(one[0], start)) for start, end in others)


def virtual_ranks(check: Check) -> Found:
    """The same bits on one and two GPUs; and stopped on two, resumed on one."""
    options = (*few(check), "--virtual-ranks", "4")
    one = check.run("virtual1", *options, "--nproc", "1")
    two = check.run("virtual2", *options, *TWO)
    same = all(one[key] == two[key] for key in ("weights_sha256", "losses"))
    return {"holds": same, "samples_per_s": [one["samples_per_s"], two["samples_per_s"]]}


def resumed_on_one(check: Check) -> Found:
    """Stopped by SIGTERM on two GPUs and resumed on one, with virtual ranks: the same bits."""
    options = ("--virtual-ranks", "2", "--epochs", "60" if check.cuda else "20")
    whole = check.run("unbroken", *options, *TWO)
    run = started(check, "fewer", *options)
    os.kill(run.process.pid, signal.SIGTERM)
    run.ended(check.until, status=75)
    again = check.run("fewer", *options, "--nproc", "1")
    same = again["weights_sha256"] == whole["weights_sha256"]
    return {"holds": same and bool(again["resumed_from"]), "resumed_from": again["resumed_from"]}


def started(check: Check, name: str, *options: str) -> Any:
    """ddp_launch on two devices, which has made its first steps."""
    folder = check.folder / name
    words = ("ddp_launch", "--device", check.device, *TWO, *options, "--output-dir", str(folder))
    run = check.start(sys.executable, "-m", "recipes", *words)
    metrics = folder / "metrics.jsonl"
    check.wait_for(lambda: metrics.exists() and metrics.stat().st_size, "the first steps")
    return run


def hanging_rank(check: Check) -> Found:
    """A rank that SIGSTOP stops is named, by its number, and the run ends with status 1."""
    run = started(check, "hanging", "--epochs", "10000", "--timeout-s", "15")
    os.kill(rank_of(run.process.pid, 1), signal.SIGSTOP)
    run.ended(check.until, status=1)
    said = [line for line in run.errors().splitlines() if line.startswith("error:")]
    return {"holds": bool(said) and "rank 1" in said[0], "says": said}


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    for process in descendants(launcher):
        with suppress(OSError):
            if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{process}/environ').read_text()}":
                return process
    raise RuntimeError(f"rank {rank} is not there")


def pipelines(check: Check) -> Found:
    """A model on two devices is the whole one, for each schedule."""
    given = ("--precision", "fp64", "--epochs", "2")
    ways = {
        "whole": ("--stages", "1"),
        "split": ("--schedule", "split"),
        "1f1b": ("--schedule", "1f1b", *TWO),
        "gpipe": ("--schedule", "gpipe", *TWO),
    }
    found = {
        way: check.run(f"pipeline {way}", *given, *more, recipe="model_parallel_toy")
        for way, more in ways.items()
    }
    return compared(found, "whole", 1e-9)


def sharded(check: Check) -> Found:
    """fsdp on two devices, and with matrices divided between them, is fsdp on one."""
    steps = "10" if check.cuda else "2"
    given = ("--precision", "fp64", "--log-every", "1", "--max-steps", steps)
    ways = {"one": ("--nproc", "1"), "fsdp": TWO, "tensor": (*TWO, "--tensor-parallel", "2")}
    found = {
        way: check.run(f"sharded {way}", *given, *more, recipe="fsdp") for way, more in ways.items()
    }
    return compared(found, "one", 1e-9)


def compared(found: dict[str, Found], base: str, most: float) -> Found:
    """Largest relative differences of the losses from those of one of them."""
    differences = {
        way: largest_difference(found[base], one) for way, one in found.items() if way != base
    }
    return {"holds": max(differences.values()) < most, "differences": differences}


PART = Part(
    {
        "nccl_works_while_the_backward_pass_computes": overlap,
        "virtual_ranks_give_the_same_bits_on_one_and_two_gpus": virtual_ranks,
        "a_rank_that_hangs_is_named": hanging_rank,
        "stopped_on_two_and_resumed_on_one_it_ends_with_the_same_bits": resumed_on_one,
        "pipelines_on_two_gpus_are_the_whole_model": pipelines,
        "fsdp_and_tensor_parallel_on_two_gpus_train_like_one": sharded,
    },
    at_once=2,
)
