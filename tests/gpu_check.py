"""`make gpu-check`: laws and measurements that need a GPU, on one of them; writes JSON.

One GPU cannot show NCCL between GPUs: that takes one process per GPU. What it shows: the NCCL path
at world size 1, several gloo ranks on one card (SyncBatchNorm's law, virtual ranks, fsdp), the same
bits twice, exact resume, mixed precision, dp_resnet50 and model_parallel_toy on one GPU; then the
speed of ResNet-50 beside what the card allows, the price of options, fsdp's memory and speed, and
checkpoint_rnn's comparison on cuDNN's LSTM. The laws, which take no times, run four at once.
`python -m tests.gpu_check --device cpu` runs the same with fewer steps and without SyncBatchNorm,
to try the script itself.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import limits
from common.group.devices import synchronize
from common.launch.process import end_with_parent
from common.reading import read_metrics
from recipes.fsdp.memory import count
from recipes.fsdp.model import TransformerOptions
from recipes.fsdp.parallel import ParallelOptions

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "gpu_check.json"


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

LONG_EPOCHS = """
import sys
from common.data import datasets
from recipes.ddp_launch.train import main
def repeated(options, seed, make=datasets.fake_data):
    data = make(options, seed)
    data.train.indices = [*data.train.indices] * 50
    return data
datasets.fake_data = repeated
sys.exit(main(sys.argv[1:]))
"""
"""ddp_launch, whose epochs of --data fake have 51,200 samples. An epoch begins without a batch that
is ready: with 1,024 samples, 4 steps, the loader's speed would count."""


def start(folder: Path, name: str, *options: str) -> str:
    """Run a recipe through the front door; what it printed."""
    return finished([sys.executable, "-m", "recipes", name, *options, "--output-dir", str(folder)])


def called(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that has ended; a stop of this process ends it, too."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=420, preexec_fn=end_with_parent
    )


def finished(command: list[str]) -> str:
    """What a command printed; RuntimeError where it failed."""
    done = called(command)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def run(folder: Path, *options: str, name: str = "ddp_launch") -> dict[str, Any]:
    """Run a recipe to its end; its summary and logged losses."""
    start(folder, name, *options)
    losses = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    return {**summary(folder), "losses": losses}


def long_epochs(folder: Path, *options: str) -> dict[str, Any]:
    """Run LONG_EPOCHS as one process; its summary."""
    finished([sys.executable, "-c", LONG_EPOCHS, *options, "--output-dir", str(folder)])
    return summary(folder)


def summary(folder: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return read


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest relative difference of the logged losses of two runs."""
    pairs = zip(a["losses"], b["losses"], strict=True)
    return max(float(abs(x - y) / abs(x)) for x, y in pairs)


Checks = dict[str, Callable[[], dict[str, Any]]]


def checks(device: str, folder: Path) -> dict[str, Checks]:
    """By group, name to function; each returns what it measured with a bool `holds`."""
    base = ("--device", device, "--epochs", "3", "--log-every", "1")
    few = () if device == "cuda" else ("--max-steps", "2")
    mixed = "bf16" if device == "cuda" else "fp32"  # portable kernels are slow at bf16
    sync = ("--norm", "batch", "--sync-bn") if device == "cuda" else ()
    resnet = ("--data", "fake", "--model", "resnet18", "--norm", "batch", *few)

    def same_bits(precision: str, *more: str) -> dict[str, Any]:
        options = (*base, *resnet, *more, "--nproc", "1", "--precision", precision)
        first, second = (run(folder / f"{precision}{i}", *options) for i in range(2))
        return {
            "holds": first["weights_sha256"] == second["weights_sha256"],
            "weights_sha256": first["weights_sha256"],
            "train_loss": first["train_loss"],
            "samples_per_s": second["samples_per_s"],
            "peak_memory_bytes": second["peak_memory_bytes"],
        }

    def one_and_two_ranks() -> dict[str, Any]:
        fp64 = (*base, *sync, "--precision", "fp64", "--backend", "gloo")
        one, two = (run(folder / f"ranks{n}", *fp64, "--nproc", str(n)) for n in (1, 2))
        difference = largest_difference(one, two)
        return {"holds": difference < 1e-9, "largest_relative_difference": difference}

    def virtual_ranks() -> dict[str, Any]:
        options = (*base, *resnet, "--virtual-ranks", "4", "--backend", "gloo")
        one, two = (run(folder / f"virtual{n}", *options, "--nproc", str(n)) for n in (1, 2))
        watched = ("--nproc", "2")
        checked = run(folder / "checked", *options, *watched)
        same = all(
            one[what] == other[what]
            for what in ("weights_sha256", "losses")
            for other in (two, checked)
        )
        return {"holds": same, "samples_per_s": [one["samples_per_s"], two["samples_per_s"]]}

    def prices() -> dict[str, Any]:
        images: tuple[str, ...] = ("--data", "fake", "--model", "resnet50", "--epochs", "1")
        images += ("--device", device, "--precision", mixed, "--num-workers", "8")
        side, steps = ("128", "200") if device == "cuda" else ("32", "2")
        images += ("--image-size", side, "--max-steps", steps)
        ways = {
            "default": (),
            "not deterministic": ("--no-deterministic",),
            "a snapshot every 20 steps": ("--snapshot-every", "20"),
            "4 virtual ranks": ("--virtual-ranks", "4"),
        }
        keys = ("samples_per_s", "elapsed_s")  # samples_per_s is without the snapshots
        found: dict[str, list[list[float]]] = {way: [] for way in ways}
        for n in range(2):
            for way, options in ways.items():
                one = long_epochs(folder / f"price {way} {n}", *images, *options)
                found[way].append([one[key] for key in keys])
        return {"holds": True, "measured": keys, "runs": found}

    def recipe_images_per_s() -> dict[str, Any]:
        size = ("224", "256", "2") if device == "cuda" else ("32", "16", "1")
        names = ("--image-size", "--global-batch-size", "--epochs")
        options = [part for pair in zip(names, size, strict=True) for part in pair]
        options += ["--data", "fake", "--model", "resnet50", "--precision", mixed]
        options += ["--channels-last", "--no-deterministic", "--num-workers", "12", *few]

        def speed(*more: str) -> float:
            given = [*options, "--device", device, *more]
            return float(long_epochs(folder / f"speed{len(more)}", *given)["samples_per_s"])

        plain, fast = speed(), speed("--compile") if device == "cuda" else None
        return {"holds": True, "batch_size": int(size[1]), "images_per_s": plain, "compiled": fast}

    def fsdp_ranks() -> dict[str, Any]:
        options = ("--device", device, "--backend", "gloo", "--max-steps", "10", "--log-every", "1")
        found = {}
        for precision in ("fp64", "fp32"):
            given = (*options, "--precision", precision)
            one, two = (
                run(folder / f"fsdp {precision} {n}", *given, "--nproc", str(n), name="fsdp")
                for n in (1, 2)
            )
            found[precision] = largest_difference(one, two)
        return {"holds": found["fp64"] < 1e-9 and found["fp32"] < 1e-3, "differences": found}

    def fsdp_memory() -> dict[str, Any]:
        large = device == "cuda"
        layers, width, heads, context, samples = (12, 1024, 16, 1024, 16) if large else (2,) * 5
        width, context = (width, context) if large else (64, 64)
        sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
        options = [part for k, v in sizes.items() for part in (f"--{k}", str(v))]
        options += ["--global-batch-size", str(samples), "--epochs", "1", "--max-steps", "20"]
        found = run(folder / "fsdp", "--device", device, "--nproc", "1", *options, name="fsdp")
        model, compute = TransformerOptions(layers, width, heads), torch.bfloat16
        one = ParallelOptions(), model, samples, context, torch.float32
        tokens_per_s, parameters = found["samples_per_s"] * context, 12 * layers * width**2
        # Chowdhery et al. 2022, "PaLM" (arXiv 2204.02311), appendix B; half of it is masked.
        operations_per_s = tokens_per_s * 6 * (parameters + layers * width * context)
        most = limits(torch.device(device))["operations_per_s"]
        return {
            "holds": True,
            **sizes,
            "counted_bytes": count((1, 1, 1), *one, compute if large else torch.float32),
            "peak_memory_bytes": found["peak_memory_bytes"],
            "tokens_per_s": tokens_per_s,
            "operations_per_s": operations_per_s,
            "share_of_the_measured_bf16_matrix_rate": operations_per_s / most,
        }

    def recorder() -> dict[str, Any]:
        said = finished([sys.executable, "-c", RECORDED, device]).splitlines()[-1]
        return {"holds": "'all_reduce', 'sizes': [[3]]" in said or device == "cpu", "says": said}

    def doctor() -> dict[str, Any]:
        said = called([sys.executable, "-m", "recipes", "doctor"]).stdout
        name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
        return {"holds": name in said, "says": said.splitlines()}

    def resume() -> dict[str, Any]:
        options = (*base, "--nproc", "1", "--dropout", "0.3")
        whole = run(folder / "whole", *options)
        run(folder / "cut", *options, "--max-steps", "17")
        cut = run(folder / "cut", *options)
        return {
            "holds": cut["weights_sha256"] == whole["weights_sha256"],
            "resumed_from": cut["resumed_from"],
        }

    def data_parallel() -> dict[str, Any]:
        # Its own default, on digits: 0.961 on an H200.
        found = run(folder / "dp", "--device", device, *few, name="dp_resnet50")
        learned = found["val_accuracy"] > 0.9 or device == "cpu"
        return {"holds": found["world_size"] == 1 and learned, **found}

    def split() -> dict[str, Any]:
        options = ("--device", device, "--precision", "fp64", "--epochs", "2")
        schedules = (("--stages", "1"), ("--schedule", "split"), ("--schedule", "micro"))
        found = [
            run(folder / f"split{n}", *options, *more, name="model_parallel_toy")
            for n, more in enumerate(schedules)
        ]
        largest = max(largest_difference(found[0], other) for other in found[1:])
        return {"holds": largest < 1e-9, "largest_relative_difference": largest}

    def checkpointing() -> dict[str, Any]:
        sizes = ("--length", "4096", "--hidden-size", "256", "--input-size", "64")
        command = [sys.executable, "-m", "tools.bench", "checkpoint_rnn", "--device", device]
        finished([*command, *sizes, "--rounds", "1", "--output", str(folder / "rnn")])
        found = json.loads((folder / "rnn" / "comparison.json").read_text())
        peaks = {int(k): runs[0]["bytes"] for k, runs in found["runs"].items()}
        # A CPU's resident memory varies (torch 2.11).
        within = found["auto"]["bytes"] <= found["auto"]["budget"] or device == "cpu"
        return {"holds": min(peaks.values()) < peaks[1] / 5 and within, "comparison": found}

    def images_per_s() -> dict[str, Any]:
        path, error = folder / "gpu.json", ""
        try:
            finished([sys.executable, "-m", "benchmarks.gpu", device, str(path)])
        except (RuntimeError, subprocess.TimeoutExpired) as failure:  # what is measured is kept
            error = str(failure)
        found: dict[str, Any] = json.loads(path.read_text())
        curves: dict[int, list[list[float]]] = {}
        for one in found["runs"].values():
            if "losses" in one:
                curves.setdefault(one["batch_size"], []).append(one["losses"])
        same = bool(curves) and all(
            first[0] - first[-1] > 1 and abs(ours - theirs) < 0.05 * (first[0] - first[-1])
            for first, *others in curves.values()
            for other in others
            for ours, theirs in zip(other, first, strict=True)
        )
        return {"holds": same and not error, "error": error, **found}

    def photos() -> dict[str, Any]:
        from benchmarks.input import WORKERS, write_files  # needs scikit-learn's images

        write_files(folder / "photos")
        command = [sys.executable, "-m", "benchmarks.input", "ours", str(folder / "photos")]
        speed = float(finished(command).splitlines()[-1]) / WORKERS
        return {
            "holds": True,
            "photos_per_s_a_process": speed,
            "processes_for_4000_per_s": math.ceil(4000 / speed),
        }

    def photos_on_the_device() -> dict[str, Any]:
        from torchcodec.decoders import decode_jpeg

        from benchmarks.input import write_files

        write_files(folder / "more photos")
        encoded = [path.read_bytes() for path in (folder / "more photos").rglob("*.jpg")]
        batches = [encoded[start : start + 64] for start in range(0, len(encoded), 64)]
        decode_jpeg(batches[0], device=device)  # loads nvJPEG
        synchronize(torch.device(device))
        start_s = time.monotonic()
        for batch in batches * 3:
            decode_jpeg(batch, device=device)
        synchronize(torch.device(device))
        return {"holds": True, "photos_per_s": 3 * len(encoded) / (time.monotonic() - start_s)}

    laws: Checks = {
        "the_same_run_twice_gives_the_same_bits_fp32": lambda: same_bits("fp32"),
        "the_same_run_twice_gives_the_same_bits_bf16_channels_last_max_pooling": lambda: same_bits(
            "bf16", "--channels-last", "--image-size", "96"
        ),
        "virtual_ranks_give_the_same_bits_on_one_and_two_gloo_ranks": virtual_ranks,
        "one_and_two_ranks_train_alike_in_fp64": one_and_two_ranks,
        "an_interrupted_run_ends_with_the_same_bits": resume,
        "fsdp_on_one_and_two_gloo_ranks_trains_alike": fsdp_ranks,
        "dp_resnet50_trains_on_one_device": data_parallel,
        "the_split_model_is_the_whole_one_in_fp64": split,
        "torchs_flight_recorder_is_read": recorder,
        "the_doctor_knows_the_device": doctor,
    }
    if device == "cuda":
        laws["the_same_run_twice_gives_the_same_bits_fp16"] = lambda: same_bits("fp16")
    return {
        "laws": laws,
        "speed": {
            "resnet50_images_per_s_and_the_same_loss_in_every_setting": images_per_s,
            "resnet50_images_per_s_through_the_recipe": recipe_images_per_s,
            "photos_that_a_loading_process_decodes": photos,
            "photos_that_the_device_decodes": photos_on_the_device,
        },
        "price": {
            "what_options_cost": prices,
            "fsdp_on_one_device": fsdp_memory,
            "checkpoint_rnn_uses_a_fifth_of_the_memory_and_auto_keeps_its_budget": checkpointing,
        },
    }


def main() -> int:
    """Run all checks; 0 if all hold, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="checks; or laws, speed, price")
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON file to write")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU is visible to torch", file=sys.stderr)
        return 2
    if arguments.only and arguments.output == RESULT:
        parser.error("--only is for a look: give another --output")
    cuda = arguments.device == "cuda"
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    result: dict[str, Any] = {
        "command": f"python -m tests.gpu_check --device {arguments.device}",
        "git_commit": commit.stdout.strip() or None,
        "machine": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "checks": {},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        groups = checks(arguments.device, Path(folder))
        available = {name: check for group in groups.values() for name, check in group.items()}
        wanted = [one for name in arguments.only or groups for one in groups.get(name, [name])]
        if unknown := set(wanted) - available.keys():
            parser.error(f"no check {', '.join(sorted(unknown))}")

        def measured(name: str) -> dict[str, Any]:
            start_s = time.monotonic()
            try:
                found = available[name]()
            except Exception as error:  # the other checks must still run
                found = {"holds": False, "error": f"{type(error).__name__}: {error}"}
            return {**found, "elapsed_s": round(time.monotonic() - start_s, 1)}

        laws, others = ([n for n in wanted if (n in groups["laws"]) == is_law] for is_law in (1, 0))
        with ThreadPoolExecutor(4 if cuda else 1) as at_once:
            for name, found in chain(
                zip(laws, at_once.map(measured, laws), strict=True),
                ((name, measured(name)) for name in others),
            ):
                result["checks"][name] = found
                print(
                    f"{'holds' if found['holds'] else 'FAILS'}  {name}  {found['elapsed_s']} s",
                    flush=True,
                )
                arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(found["holds"] for found in result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
