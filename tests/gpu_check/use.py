"""What users do with every run: train, use the result, stop, lose a rank, go on, run the tests."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.gpu_check.check import Check, Found, Once, Part, read_run

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
TESTS = ("tests/common/launch/test_ranks.py", "tests/tools/test_recorded.py")
"""A handful of those that `make test` runs."""
VERDICTS = ("identical", "equal within", "different from step")

default_run = Once("default")
"""The run that the other checks use: ddp_launch's default, on all GPUs."""
longer_run = Once("longer", "--epochs", "45")


def first_line(check: Check) -> Found:
    """A default run says its device and the option's own backend, and warns of nothing."""
    log = default_run(check)["log"]
    said, warned = Path(log).read_text().splitlines()[0], Path(f"{log}.err").read_text()
    backend = "backend nccl" if check.cuda else "backend gloo"
    quiet = "Warning" not in warned
    return {"holds": f"device {check.device}" in said and backend in said and quiet, "says": said}


def a_default(check: Check, name: str, *small: str) -> Found:
    """A recipe ends with status 0; on a CPU with fewer steps."""
    folder = check.folder / name
    options = () if check.cuda else small
    words = (name, "--device", check.device, *options, "--output-dir", str(folder))
    said = check.recipes(*words)
    summary = folder / "summary.json"
    return {"holds": True, **(read_run(folder) if summary.exists() else {"says": said[-1000:]})}


def resumed(check: Check, how: str) -> Found:
    """A run that is stopped by SIGTERM, or killed, in the middle and is resumed: the same bits."""
    whole, folder = longer_run(check), check.folder / how
    words = ("ddp_launch", "--device", check.device, *longer_run.options)
    run = check.start(sys.executable, "-m", "recipes", *words, "--output-dir", str(folder))
    metrics = folder / "metrics.jsonl"
    check.wait_for(
        lambda: metrics.exists() and metrics.read_text().count("val_accuracy") > 1, "two epochs"
    )  # then the first one's snapshot is on the disk
    if how == "stopped":
        os.kill(run.process.pid, signal.SIGTERM)
        run.ended(check.until, status=75)
    else:
        run.kill()
    again = check.run(how, *longer_run.options)
    same = again["weights_sha256"] == whole["weights_sha256"]
    return {"holds": same and bool(again["resumed_from"]), "resumed_from": again["resumed_from"]}


def evaluated(check: Check, device: str) -> Found:
    run = default_run(check)
    words = ("evaluate", str(check.folder / "default"), "--json", "--device", device)
    found = json.loads(check.recipes(*words, env=HIDDEN if device == "cpu" else None))
    same = abs(found["val_accuracy"] - run["val_accuracy"]) < (1e-12 if device != "cpu" else 0.01)
    return {"holds": same, "evaluated": found}


def predicted(check: Check, device: str) -> Found:
    """Classes of eight pictures; `both_devices_agree` compares them."""
    default_run(check)
    photos = pictures(check.folder / "pictures")
    words = ("predict", str(check.folder / "default"), str(photos), "--json", "--device", device)
    lines = check.recipes(*words, env=HIDDEN if device == "cpu" else None).splitlines()
    return {"holds": len(lines) == 8, "says": [json.loads(line) for line in lines]}


def pictures(folder: Path) -> Path:
    """Eight small pictures."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    for n in range(8):
        data = bytes((x * y * (n + 1)) % 256 for x in range(8) for y in range(8))
        Image.frombytes("L", (8, 8), data).save(folder / f"{n}.png")
    return folder


def reproduced(check: Check, device: str) -> Found:
    """On the run's device the verdict is `identical`; on a CPU there is a verdict."""
    default_run(check)
    output = check.folder / check.name
    words = ("reproduce", str(check.folder / "default"), "--output-dir", str(output))
    command = check.start(
        sys.executable, "-m", "recipes", *words, env=HIDDEN if device == "cpu" else None
    )
    try:
        said = command.ended(check.until)
    except RuntimeError:
        if device != "cpu" or not (output / "reproduce.json").exists():
            raise
        said = command.log.read_text()  # other bits: status 1, with a verdict
    verdict = next((word for word in VERDICTS if word in said), None)
    as_promised = verdict == "identical" or (device == "cpu" and check.cuda and verdict)
    return {"holds": bool(as_promised), "verdict": verdict}


def make_test(check: Check, env: dict[str, str] | None) -> Found:
    """`make test` of a few files, with the GPUs hidden or visible."""
    words = ("make", "test", f"PYTHON={sys.executable}", f"ARGS={' '.join(TESTS)}")
    return {"holds": True, "says": check.call(*words, env=env).splitlines()[-1]}


def doctor(check: Check) -> Found:
    said = check.recipes("doctor")
    return {"holds": not check.cuda or "cuda:0" in said, "says": said.splitlines()}


SMALL = {
    "ddp_spawn": ("--epochs", "1"),
    "dp_resnet50": ("--max-steps", "2"),
    "dp_scratch": ("--max-steps", "2", "--no-lesson"),
    "model_parallel_toy": ("--epochs", "1"),
    "fsdp": ("--max-steps", "2"),
    "checkpoint_rnn": ("--max-steps", "2"),
    "tune_loader": ("--image-size", "32", "--samples", "96", "--rounds", "1"),
    "check_network": (),
}
"""The recipes beside ddp_launch, and what makes them small on a CPU."""

DEFAULTS: dict[str, Callable[[Check], Found]] = {
    f"default_of_{name}": lambda check, name=name, small=small: a_default(check, name, *small)  # type: ignore[misc]
    for name, small in SMALL.items()
}

PART = Part(
    {
        "the_default_run_says_its_device_and_warns_of_nothing": first_line,
        "stopped_in_the_middle_it_ends_with_the_same_bits": partial(resumed, how="stopped"),
        "killed_in_the_middle_it_ends_with_the_same_bits": partial(resumed, how="killed"),
        "evaluate_on_the_device": lambda check: evaluated(check, check.device),
        "evaluate_on_the_cpu": partial(evaluated, device="cpu"),
        "predict_on_the_device": lambda check: predicted(check, check.device),
        "predict_on_the_cpu": partial(predicted, device="cpu"),
        "reproduce_on_the_device": lambda check: reproduced(check, check.device),
        "reproduce_on_the_cpu": partial(reproduced, device="cpu"),
        **DEFAULTS,
        "doctor_knows_the_device": doctor,
        "make_test_with_gpus_hidden": partial(make_test, env=HIDDEN),
        "make_test_with_gpus_visible": partial(make_test, env=None),
    },
    at_once=4,
)
