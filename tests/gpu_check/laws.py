"""The laws of the recipes, on one GPU: they take no times, so four run at once."""

import sys
from functools import partial

from tests.gpu_check.check import Check, Found, Part, largest_difference

RECORDED = """
import sys, torch, torch.distributed as dist
from common.group.devices import choose_device
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from common.watch.record import _collectives
device = choose_device(sys.argv[1], Ranks())
with process_group(Ranks(), device, "auto", 60):
    dist.all_reduce(tensor := torch.ones(3, device=device))
    tensor.tolist()  # the first one connects
    if device.type == "cuda":
        torch.cuda._sleep(10**9)  # for half a second, the next one cannot end
    work = dist.all_reduce(tensor, async_op=True)
    print(_collectives())
"""
"""Prints the collectives that are not done, as `common.watch` reads them from torch's recorder."""

NO_WAITING = """
import sys, torch
from common.run.loop import Loop
from recipes.ddp_launch.train import main
after_step, mode = Loop.after_step, torch.cuda.set_sync_debug_mode
def looked_at(loop, losses):
    if loop.state.step == 19 and torch.cuda.is_initialized():  # the next one logs
        mode("default")
    after_step(loop, losses)
    if loop.state.step == 3 and torch.cuda.is_initialized():
        mode("error")
Loop.after_step = looked_at
sys.exit(main(sys.argv[1:]))
"""
"""ddp_launch, in which torch raises an error at an operation that waits for the GPU."""


def base(check: Check) -> tuple[str, ...]:
    """Three epochs with every loss; on a CPU fewer steps."""
    few = () if check.cuda else ("--max-steps", "2")
    return ("--epochs", "3", "--log-every", "1", *few)


def resnet(check: Check) -> tuple[str, ...]:
    """A ResNet with BatchNorm, on images."""
    return (*base(check), "--data", "fake", "--model", "resnet18", "--norm", "batch")


def same_bits(check: Check, precision: str, *more: str) -> Found:
    precision = precision if check.cuda else "fp32"  # on a CPU, portable bf16 is slow
    given = (*resnet(check), *more, "--nproc", "1", "--precision", precision)
    first, second = (check.run(f"{check.name} {n}", *given) for n in range(2))
    keys = ("weights_sha256", "train_loss", "samples_per_s", "peak_memory_bytes")
    same = first["weights_sha256"] == second["weights_sha256"]
    return {"holds": same, **{key: second[key] for key in keys}}


def virtual_ranks(check: Check) -> Found:
    options = (*resnet(check), "--virtual-ranks", "4", "--backend", "gloo")
    one, two = (check.run(f"virtual{n}", *options, "--nproc", str(n)) for n in (1, 2))
    keys = ("weights_sha256", "losses")
    same = all(one[key] == two[key] for key in keys)
    return {"holds": same, "samples_per_s": [one["samples_per_s"], two["samples_per_s"]]}


def one_and_two_ranks(check: Check) -> Found:
    sync = ("--norm", "batch", "--sync-bn") if check.cuda else ()
    options = (*base(check), *sync, "--precision", "fp64", "--backend", "gloo")
    one, two = (check.run(f"ranks{n}", *options, "--nproc", str(n)) for n in (1, 2))
    difference = largest_difference(one, two)
    return {"holds": difference < 1e-9, "largest_relative_difference": difference}


def resumed(check: Check) -> Found:
    options = ("--epochs", "3", "--nproc", "1", "--dropout", "0.3")
    whole = check.run("whole", *options)
    check.run("cut", *options, "--max-steps", "17")
    cut = check.run("cut", *options)
    same = cut["weights_sha256"] == whole["weights_sha256"]
    return {"holds": same, "resumed_from": cut["resumed_from"]}


def fsdp_ranks(check: Check) -> Found:
    options = ("--backend", "gloo", "--log-every", "1", "--max-steps")
    differences = {}
    for precision in ("fp64", "fp32"):
        given = (*options, "10" if check.cuda else "2", "--precision", precision)
        one, two = (
            check.run(f"fsdp {precision} {n}", *given, "--nproc", str(n), recipe="fsdp")
            for n in (1, 2)
        )
        differences[precision] = largest_difference(one, two)
    holds = differences["fp64"] < 1e-9 and differences["fp32"] < 1e-3
    return {"holds": holds, "differences": differences}


def data_parallel(check: Check) -> Found:
    few = () if check.cuda else ("--max-steps", "2")
    found = check.run("dp", *few, recipe="dp_resnet50")
    learned = found["val_accuracy"] > 0.9 or not check.cuda
    return {"holds": found["world_size"] == 1 and learned, **found}


def split_model(check: Check) -> Found:
    ways = (("--stages", "1"), ("--schedule", "split"), ("--schedule", "micro"))
    found = [
        check.run(
            f"split{n}", "--precision", "fp64", "--epochs", "2", *way, recipe="model_parallel_toy"
        )
        for n, way in enumerate(ways)
    ]
    largest = max(largest_difference(found[0], other) for other in found[1:])
    return {"holds": largest < 1e-9, "largest_relative_difference": largest}


def no_waiting(check: Check) -> Found:
    few = ("--max-steps", "20", "--log-every", "20", "--clip-grad-norm", "1", "--nproc", "1")
    folder = str(check.folder / "no waiting")
    where = ("--device", check.device, "--output-dir", folder)
    words = (*where, *few, "--global-batch-size", "64" if check.cuda else "8")
    check.call(sys.executable, "-c", NO_WAITING, *words)
    return {"holds": True, "steps": 16}


def recorder(check: Check) -> Found:
    said = check.call(sys.executable, "-c", RECORDED, check.device).splitlines()[-1]
    return {"holds": "'all_reduce', 'sizes': [[3]]" in said or not check.cuda, "says": said}


PART = Part(
    {
        "the_same_run_twice_gives_the_same_bits_fp32": partial(same_bits, precision="fp32"),
        "the_same_run_twice_gives_the_same_bits_bf16_channels_last_max_pooling": lambda check: (
            same_bits(
                check, "bf16", "--channels-last", "--image-size", "96" if check.cuda else "64"
            )
        ),
        "the_same_run_twice_gives_the_same_bits_fp16": partial(same_bits, precision="fp16"),
        "virtual_ranks_give_the_same_bits_on_one_and_two_gloo_ranks": virtual_ranks,
        "fsdp_on_one_and_two_gloo_ranks_trains_alike": fsdp_ranks,
        "one_and_two_ranks_train_alike_in_fp64": one_and_two_ranks,
        "an_interrupted_run_ends_with_the_same_bits": resumed,
        "dp_resnet50_trains_on_one_device": data_parallel,
        "the_split_model_is_the_whole_one_in_fp64": split_model,
        "torchs_flight_recorder_is_read": recorder,
        "no_step_waits_for_the_gpu_between_two_log_lines": no_waiting,
    },
    at_once=4,
)
