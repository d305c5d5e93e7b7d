"""`make gpu-check`: the laws that need a GPU, on one of them, in a few minutes; writes JSON.

One GPU cannot show NCCL between GPUs: that takes one process a GPU. What it shows: the NCCL path at
world size 1, several gloo ranks on one card (SyncBatchNorm's law, virtual ranks), determinism and
its price, exact resume, mixed precision, dp_resnet50 and model_parallel_toy on one GPU,
checkpoint_rnn --compare on cuDNN's LSTM, and the speed of ResNet-50 beside what the card allows.
`python -m tests.gpu_check --device cpu` runs the same without SyncBatchNorm, to try the
script itself.
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
from pathlib import Path
from typing import Any

import torch

from common.files import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "gpu_check.json"


def start(folder: Path, name: str, *options: str) -> str:
    """Run a recipe through the front door; what it printed."""
    return finished([sys.executable, "-m", "recipes", name, *options, "--output-dir", str(folder)])


def finished(command: list[str]) -> str:
    """What a command printed; RuntimeError where it failed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=420)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def run(folder: Path, *options: str, name: str = "ddp_launch") -> dict[str, Any]:
    """Run a recipe to its end; its summary and logged losses."""
    start(folder, name, *options)
    losses = [line["loss"] for line in read_metrics(folder) if "loss" in line]
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return {**summary, "losses": losses}


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest relative difference of the logged losses of two runs."""
    pairs = zip(a["losses"], b["losses"], strict=True)
    return max(float(abs(x - y) / abs(x)) for x, y in pairs)


def checks(device: str, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name to function; each returns what it measured with a bool `holds`."""
    base = ("--device", device, "--epochs", "3", "--log-every", "1")
    sync = ("--norm", "batch", "--sync-bn") if device == "cuda" else ()
    resnet = ("--data", "fake", "--model", "resnet18", "--norm", "batch")

    def same_bits(precision: str) -> dict[str, Any]:
        first, second = (
            run(
                folder / f"{precision}{i}", *base, *resnet, "--nproc", "1", "--precision", precision
            )
            for i in range(2)
        )
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
        watched = ("--nproc", "2", "--audit", "2", "--check-replicas", "2")
        audited = run(folder / "audited", *options, *watched)
        same = all(
            one[what] == other[what]
            for what in ("weights_sha256", "losses")
            for other in (two, audited)
        )
        return {"holds": same, "samples_per_s": [one["samples_per_s"], two["samples_per_s"]]}

    def price_of_determinism() -> dict[str, Any]:
        images = (
            "--data",
            "fake",
            "--model",
            "resnet50",
            "--image-size",
            "128",
            "--nproc",
            "1",
            "--device",
            device,
            "--precision",
            "bf16",
            "--epochs",
            "4",
            "--num-workers",
            "8",
            "--max-steps",
            "40" if device == "cuda" else "2",
        )
        ways = ("--deterministic", "--no-deterministic")
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for n in range(3):
            for way in ways:
                found = run(folder / f"price{way}{n}", *images, way)
                speeds[way].append(found["samples_per_s"])
        return {"holds": True, "samples_per_s": speeds}

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
        options = ("--data", "fake", "--image-size", "64", "--epochs", "3", "--lr", "0.02")
        found = run(folder / "dp", "--device", device, *options, name="dp_resnet50")
        return {"holds": found["world_size"] == 1 and found["val_accuracy"] > 0.5, **found}

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
        start(
            folder / "rnn",
            "checkpoint_rnn",
            "--device",
            device,
            "--compare",
            "--compare-rounds",
            "1",
            *sizes,
        )
        found = json.loads((folder / "rnn" / "comparison.json").read_text())
        peaks = {int(k): runs[0]["bytes"] for k, runs in found["runs"].items()}
        within = found["auto"]["bytes"] <= found["auto"]["budget"]
        return {"holds": min(peaks.values()) < peaks[1] / 5 and within, "comparison": found}

    def images_per_s() -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.gpu", device]
        found: dict[str, Any] = json.loads(finished(command).splitlines()[-1])
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
        return {"holds": same, **found}

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

    return {
        "one_and_two_ranks_train_alike_in_fp64": one_and_two_ranks,
        "an_interrupted_run_ends_with_the_same_bits": resume,
        "the_same_run_twice_gives_the_same_bits_fp32": lambda: same_bits("fp32"),
        "the_same_run_twice_gives_the_same_bits_bf16": lambda: same_bits("bf16"),
        "virtual_ranks_give_the_same_bits_on_one_and_two_gloo_ranks": virtual_ranks,
        "what_determinism_costs": price_of_determinism,
        "resnet50_images_per_s_and_the_same_loss_in_every_setting": images_per_s,
        "photos_that_a_loading_process_decodes": photos,
        "dp_resnet50_trains_on_one_device": data_parallel,
        "the_split_model_is_the_whole_one_in_fp64": split,
        "checkpoint_rnn_uses_a_fifth_of_the_memory_and_auto_keeps_its_budget": checkpointing,
    } | (
        {"the_same_run_twice_gives_the_same_bits_fp16": lambda: same_bits("fp16")}
        if device == "cuda"
        else {}
    )


def main() -> int:
    """Run all checks; 0 if all hold, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="checks, into --output")
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
    arguments.output.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        available = checks(arguments.device, Path(folder))
        if unknown := set(arguments.only or ()) - available.keys():
            parser.error(f"no check {', '.join(sorted(unknown))}")
        for name in arguments.only or available:
            start_s = time.monotonic()
            try:
                found = available[name]()
            except (RuntimeError, ImportError, subprocess.TimeoutExpired) as error:
                found = {"holds": False, "error": str(error)}
            found["elapsed_s"] = round(time.monotonic() - start_s, 1)
            result["checks"][name] = found
            print(
                f"{'holds' if found['holds'] else 'FAILS'}  {name}  {found['elapsed_s']} s",
                flush=True,
            )
            arguments.output.write_text(json.dumps(result, indent=2) + "\n")  # what is there stays
    return 0 if all(found["holds"] for found in result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
