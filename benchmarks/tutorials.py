"""Does a command that a page gives as a tutorial's training train as the tutorial's own code?

Both train in float64, from the same weights and on the same batches of made-up images; then their
weights are compared. The tutorials' code is read from clones of their repositories; none is here.

    python -m benchmarks.tutorials D2L FLOWERS     renews results/tutorials.json
        D2L: clone of d2l-ai/d2l-en
        FLOWERS: clone of WZMIAOMIAO/deep-learning-for-image-processing
"""

import argparse
import ast
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import ROOT, cli
from common.data.datasets import load_data
from common.data.loaders import rank_loaders
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from common.manifest import describe_machine
from common.run.plan import make_plan
from common.seeds import seed_everything
from common.training.models import build_model
from common.writing import write_json
from recipes.dp_scratch.lenet import initialize
from tools.comparison import run_recipe
from tools.fresh import run_fresh

RESULT = ROOT / "benchmarks" / "results" / "tutorials.json"
EQUAL = 1e-12
"""Weights that differ by less are equal up to rounding: sums are taken in another order."""

CPU = torch.device("cpu")
CHAPTER = "chapter_computational-performance/multiple-gpus"
FLOWERS = "pytorch_classification/train_multi_GPU"
Batches = list[list[tuple[Tensor, Tensor]]]
"""By epoch."""


@dataclass(frozen=True)
class Case:
    """A command on a page."""

    recipe: str
    page: str
    has: str
    """Words by which the command is found on it."""
    left_out: str
    """Words that need a GPU or the network."""
    added: str

    @property
    def words(self) -> list[str]:
        """Its options, for small data on a CPU."""
        text = (ROOT / self.page).read_text().replace("\\\n", " ")
        commands = re.findall(rf'RECIPE={self.recipe} [^"\n]*ARGS="([^"]+)"', text)
        found = [" ".join(command.split()) for command in commands]
        (command,) = [command for command in found if self.has in command]
        for word in self.left_out.split(","):
            command = command.replace(f" {word}", "")
        return [*command.split(), *self.added.split(), "--precision", "fp64"]


GIVEN = "--log-every 1 --snapshot-every 0"
ONE_GPU, TWO_GPUS = (
    Case(
        "dp_resnet50",
        "recipes/dp_resnet50/README.md",
        f"--device-ids {ids} --global",
        f"--download,--device-ids {ids}",
        f"--max-steps 2 {GIVEN}",
    )
    for ids in ("0", "0 1")
)
BY_HAND = Case(
    "dp_scratch",
    "recipes/dp_scratch/README.md",
    "--data fashion_mnist",
    "--download",
    f"--devices cpu cpu {GIVEN}",
)
PHOTOS = Case(
    "ddp_launch",
    "docs/flower-photos.md",
    "--lr-schedule cosine-by-epoch",
    "--download,--sync-bn",
    f"--nproc 2 --image-size 64 --max-steps 6 --no-verify-images --num-workers 0 {GIVEN}",
)


def write_data(folder: Path) -> None:
    """Images in Fashion-MNIST's format, and 100 photos in 5 classes; all of noise."""
    random = np.random.default_rng(0)
    raw = folder / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 1024), ("t10k", 32)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count) % 10)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (raw / f"{part}-{name}-ubyte").write_bytes(head + array.astype(np.uint8).tobytes())
    for number in range(100):
        path = folder / "flower_photos" / str(number % 5) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)


def in_folder(words: Sequence[str], folder: Path) -> list[str]:
    """The words, with the data in `folder`."""
    found = [str(folder / w) if w in ("data", "flower_photos") else w for w in words]
    where = [] if "--data-path" in words else ["--data-path", str(folder / "flower_photos")]
    return [*found, *where]


def batches_of(case: Case, folder: Path, world_size: int) -> tuple[list[Batches], Any, Any]:
    """Each rank's batches, epoch by epoch; the configuration and the data."""
    config_type = import_module(f"recipes.{case.recipe}.train").Config
    _, config = cli.parse(case.recipe, config_type, in_folder(case.words, folder))
    seed_everything(config.run.seed)  # as the recipe does, before it draws initial weights
    with process_group(Ranks(), CPU, "gloo", 600):
        data = load_data(config.data, config.run.seed, Ranks())
        plan = make_plan(config.optimizer, len(data.train), world_size)
        found = []
        for rank in range(world_size):
            own = list[list[tuple[Tensor, Tensor]]]()
            loader, _ = rank_loaders(
                data, config.data, plan.sizes, config.run.seed, rank, CPU, torch.float64, folder
            )
            for epoch in range(-(-plan.last_step // plan.steps_per_epoch)):
                loader.keys.set_epoch(epoch, 0, plan.last_step - epoch * plan.steps_per_epoch)
                own.append([(images, labels) for images, labels in loader])
            found.append(own)
    return found, config, data


def run_ours(case: Case, folder: Path, name: str, more: Sequence[str] = ()) -> dict[str, Tensor]:
    """The weights at the end of the page's command."""
    out, words = folder / name, in_folder(case.words, folder)
    if "--weights" in more and "--no-zero-init-residual" in words:
        words.remove("--no-zero-init-residual")  # it is for initial weights
    run_recipe(case.recipe, [*words, *more], out)
    found: dict[str, Tensor] = torch.load(out / "model.pt", weights_only=True)
    return found


class ByEpoch:
    """What a tutorial's loop reads: the batches of the next epoch each time; at last none."""

    def __init__(self, batches: Batches) -> None:
        self.left = list(batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.left.pop(0) if self.left else [])


class Quiet:
    """In place of d2l's timer and its plot."""

    Y = ((0.0,),)

    def __init__(self, *_: Any, **_options: Any) -> None:
        self.start = self.stop = self.add = lambda *_: None
        self.avg = lambda: 0.0


def shown(repository: Path, path: str) -> str:
    """A file of a clone, as it is at HEAD."""
    command = ["git", "-C", str(repository), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def lesson(repository: Path, chapter: str, batches: Batches) -> dict[str, Any]:
    """The functions of a chapter of d2l; `train` reads `batches`, and its GPUs are the CPU."""
    text, library = shown(repository, f"{chapter}.md"), shown(repository, "d2l/torch.py")
    cells = re.findall(r"(?s)```\{\.python \.input\}\n#@tab pytorch\n(.*?)```", text)
    (sgd,) = [
        n for n in ast.parse(library).body if isinstance(n, ast.FunctionDef) and n.name == "sgd"
    ]
    d2l = SimpleNamespace(
        Timer=Quiet,
        Animator=Quiet,
        try_gpu=lambda _: CPU,
        evaluate_accuracy_gpu=lambda *_: 0.0,
        load_data_fashion_mnist=lambda _: (ByEpoch(batches), []),
    )
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "d2l": d2l}
    exec(ast.unparse(sgd), names)  # noqa: S102
    d2l.sgd = names["sgd"]
    for cell in cells:
        if "def " in cell and "def resnet18" not in cell:
            exec(cell, names)  # noqa: S102
    names["split_batch"] = lambda x, y, _: ((x,), (y,))  # nn.parallel.scatter needs GPUs
    return names


def compare_by_hand(repository: Path, folder: Path) -> tuple[Any, Any, Any]:
    """dp_scratch on two devices, and the lesson's `train` on one; weights at first and at last."""
    ((batches,), _, _) = batches_of(BY_HAND, folder, 1)
    begun = initialize(torch.float64)
    names = lesson(repository, CHAPTER, batches)
    theirs = [w.t().clone() if w.dim() == 2 else w.clone() for w in begun.values()]
    names["params"] = theirs
    with mock.patch.object(torch.cuda, "synchronize"):
        names["train"](num_gpus=1, batch_size=256, lr=0.2)
    turned = [w.detach().t() if w.dim() == 2 else w.detach() for w in theirs]
    ours = run_ours(BY_HAND, folder, "by hand", ["--no-lesson"])
    return begun, ours, dict(zip(begun, turned, strict=True))


def compare_resnet(case: Case, gpus: int) -> Callable[[Path, Path], tuple[Any, Any, Any]]:
    """dp_resnet50 from the lesson's initial weights, and the lesson's `train` with its model."""

    def compare(repository: Path, folder: Path) -> tuple[Any, Any, Any]:
        ((batches,), config, data) = batches_of(case, folder, 1)
        net = build_model(config.model, *data.sizes_for_model).double()
        for read in ([], batches):
            train = lesson(repository, f"{CHAPTER}-concise", read)["train"]
            torch.manual_seed(0)
            train(net, num_gpus=1, batch_size=256 * gpus, lr=0.1 * gpus)
            if not read:  # only the weights were drawn
                begun = {name: value.clone() for name, value in net.state_dict().items()}
        weights = folder / f"{gpus}.pt"
        torch.save(begun, weights)
        ours = run_ours(case, folder, f"resnet {gpus}", ["--weights", str(weights)])
        return begun, ours, net.state_dict()

    return compare


def compare_flowers(schedule: str) -> Callable[[Path, Path], tuple[Any, Any, Any]]:
    """ddp_launch on two processes, and the tutorial's model and epoch on two."""

    def compare(repository: Path, folder: Path) -> tuple[Any, Any, Any]:
        batches, _, _ = batches_of(PHOTOS, folder, 2)
        torch.save(batches, folder / "batches.pt")
        archive = ["git", "-C", str(repository), "archive", "HEAD", FLOWERS]
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=packed)
        torchrun = ["--standalone", "--nproc-per-node", "2", "-m", "benchmarks.tutorials", "rank"]
        run_fresh("torch.distributed.run", [*torchrun, folder])
        begun, theirs = (torch.load(folder / f"{n}.pt") for n in ("begun", "theirs"))
        more = ["--weights", str(folder / "begun.pt"), "--lr-schedule", schedule]
        return begun, run_ours(PHOTOS, folder, schedule, more), theirs

    return compare


def train_flowers(folder: Path) -> None:
    """Train as one of torchrun's two ranks: optimizer and schedule of the tutorial's `main`."""
    sys.path.insert(0, str(folder / FLOWERS))
    resnet34 = import_module("model").resnet34
    train_one_epoch = import_module("multi_train_utils.train_eval_utils").train_one_epoch
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = resnet34(num_classes=5).double()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "begun.pt")
    ddp = DistributedDataParallel(model)
    rate = 0.001 * dist.get_world_size()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=0.9, weight_decay=0.005)
    fall = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: (1 + math.cos(epoch * math.pi / 30)) / 2 * 0.9 + 0.1
    )
    for epoch, batches in enumerate(torch.load(folder / "batches.pt")[dist.get_rank()]):
        train_one_epoch(ddp, optimizer, batches, CPU, epoch)
        fall.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "theirs.pt")
    dist.destroy_process_group()


def largest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of two models' values."""
    assert one.keys() == other.keys()
    found = [(value - other[name]).abs().max().double() for name, value in one.items()]
    return float(torch.stack(found).max())  # NaN if one is


CASES = {
    "dp_scratch, d2l 13.5": (BY_HAND, "d2l", compare_by_hand),
    "dp_resnet50, the command for one GPU, d2l 13.6": (ONE_GPU, "d2l", compare_resnet(ONE_GPU, 1)),
    "dp_resnet50, the command for two GPUs, d2l 13.6": (
        TWO_GPUS,
        "d2l",
        compare_resnet(TWO_GPUS, 2),
    ),
    "flower photos": (PHOTOS, "flowers", compare_flowers("cosine-by-epoch")),
    "flower photos, but --lr-schedule cosine": (PHOTOS, "flowers", compare_flowers("cosine")),
}


def main() -> int:
    """Compare all; 1 if one that must be equal differs, or the last one does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("d2l", type=Path)
    parser.add_argument("flowers", type=Path)
    given = vars(parser.parse_args())
    found: dict[str, dict[str, Any]] = {}
    for name, (case, whose, compare) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            write_data(Path(scratch))
            begun, ours, theirs = compare(given[whose], Path(scratch))
        found[name] = {
            "options": " ".join(case.words),
            "largest_change": largest(ours, begun),
            "largest_difference": largest(ours, theirs),
        }
        print(name, json.dumps(found[name]), flush=True)
    commits = {
        name: subprocess.check_output(["git", "-C", path, "rev-parse", "HEAD"], text=True).strip()
        for name, path in given.items()
    }
    command = "python -m benchmarks.tutorials D2L FLOWERS"
    about = {"command": command, "commits": commits, **describe_machine()}
    write_json(RESULT, {"about": about, "found": found})
    differs = [not values["largest_difference"] < EQUAL for values in found.values()]
    return int(differs != [False] * (len(CASES) - 1) + [True])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train_flowers(Path(sys.argv[2]))
    else:
        sys.exit(main())
