"""What options cost in time, and what fsdp and checkpoint_rnn take of memory; one at a time."""

import json
import sys
from functools import partial

from tests.gpu_check.check import Check, Found, Part

COUNTED = """
import sys, json, torch
from benchmarks.gpu import limits
from recipes.fsdp.memory import count
from recipes.fsdp.model import TransformerOptions
from recipes.fsdp.parallel import ParallelOptions
layers, width, heads, context, samples = map(int, sys.argv[2:])
compute = torch.bfloat16 if sys.argv[1] == "cuda" else torch.float32
model = TransformerOptions(layers, width, heads)
counted = count((1, 1, 1), ParallelOptions(), model, samples, context, torch.float32, compute)
print(json.dumps({"counted": counted, **limits(torch.device(sys.argv[1]))}))
"""
"""Prints the bytes that fsdp counts, and the device's measured limits."""


def sizes(check: Check) -> tuple[str, ...]:
    """Options of the timed runs of ddp_launch: six epochs of 16 steps of ResNet-50."""
    size = ("128", "64", "bf16", "8") if check.cuda else ("32", "8", "fp32", "1")
    names = ("--image-size", "--global-batch-size", "--precision", "--num-workers")
    options = [part for pair in zip(names, size, strict=True) for part in pair]
    few = ("--epochs", "6") if check.cuda else ("--epochs", "1", "--max-steps", "2")
    model = "resnet50" if check.cuda else "resnet18"
    return ("--data", "fake", "--model", model, "--nproc", "1", *few, *options)


def time_of(check: Check, options: tuple[str, ...]) -> Found:
    """Seconds of a run by what they went to, beside those of the default."""
    found = check.run(check.name, *sizes(check), *options)
    keys = ("samples_per_s", "elapsed_s", "time_s", "peak_memory_bytes")
    return {"holds": True, **{key: found[key] for key in keys}}


def fsdp_memory(check: Check) -> Found:
    """fsdp's peak memory beside the bytes it counts, and its share of the matrix rate."""
    small = (2, 64, 2, 64, 2)
    layers, width, heads, context, samples = (12, 1024, 16, 1024, 16) if check.cuda else small
    names = ("--layers", "--width", "--heads", "--context", "--global-batch-size")
    given = [str(n) for n in (layers, width, heads, context, samples)]
    options = [part for pair in zip(names, given, strict=True) for part in pair]
    found = check.run(
        "fsdp", "--nproc", "1", *options, "--epochs", "1", "--max-steps", "20", recipe="fsdp"
    )
    said = check.call(sys.executable, "-c", COUNTED, check.device, *given)
    counted = json.loads(said.splitlines()[-1])
    tokens_per_s, parameters = found["samples_per_s"] * context, 12 * layers * width**2
    # Chowdhery et al. 2022, "PaLM" (arXiv 2204.02311), appendix B; half of it is masked.
    operations_per_s = tokens_per_s * 6 * (parameters + layers * width * context)
    return {
        "holds": True,
        "options": options,
        **counted,
        "peak_memory_bytes": found["peak_memory_bytes"],
        "tokens_per_s": tokens_per_s,
        "share_of_the_measured_bf16_matrix_rate": operations_per_s / counted["operations_per_s"],
    }


def checkpointing(check: Check) -> Found:
    """checkpoint_rnn takes a fifth of the memory, and `auto` keeps its budget."""
    length, hidden = ("4096", "256") if check.cuda else ("1024", "64")
    sizes = ("--length", length, "--hidden-size", hidden, "--input-size", "64")
    words = ("-m", "tools.bench", "checkpoint_rnn", "--device", check.device, *sizes)
    folder = check.folder / "rnn"
    check.call(sys.executable, *words, "--rounds", "1", "--output", str(folder))
    found = json.loads((folder / "comparison.json").read_text())
    peaks = {int(k): runs[0]["bytes"] for k, runs in found["runs"].items()}
    within = found["auto"]["bytes"] <= found["auto"]["budget"]
    # A CPU's resident memory varies (torch 2.11).
    holds = (min(peaks.values()) < peaks[1] / 5 and within) or not check.cuda
    return {"holds": holds, "comparison": found}


WAYS = {
    "default": (),
    "not_deterministic": ("--no-deterministic",),
    "a_snapshot_every_4_steps": ("--snapshot-every", "4"),
    "4_virtual_ranks": ("--virtual-ranks", "4"),
    "no_best_pt": ("--best-by", "none"),
}

PART = Part(
    {
        **{f"time_of_{way}": partial(time_of, options=options) for way, options in WAYS.items()},
        "fsdp_on_one_device": fsdp_memory,
        "checkpoint_rnn_uses_a_fifth_of_the_memory": checkpointing,
    }
)
