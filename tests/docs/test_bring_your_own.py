"""Your own data, model and recipe: what docs/bring-your-own.md promises, and the record of it."""

import importlib
import itertools
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import ndiff
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.nn.functional import cross_entropy, l1_loss, mse_loss
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, default_collate
from torchvision.datasets import FakeData
from torchvision.transforms import v2

import recipes
from common import cli, git, log
from common.data.batches import DeviceBatches
from common.data.datasets import ArraySamples, Data, LoaderOptions
from common.data.loaders import make_loader, rank_loaders
from common.data.stream import FixedBatches, Samples
from common.errors import InputError, SampleError, TrainingError
from common.hints import hint
from common.identity import decisive
from common.launch.ranks import Ranks
from common.launch.report import report
from common.run.options import RunOptions, flatten
from common.seeds import rng_state
from common.snapshots.snapshot_files import read as read_snapshot
from common.training.ddp import chunks, warm_up
from common.training.evaluation import Evaluation, evaluate, score_classes
from common.training.losses import refuse_other_losses, warn_of_graph
from common.training.optimizer import OptimizerOptions
from common.weights import weights_sha256
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.commands import ROOT, Recipe, Result, clean_env, copy_of_repository
from tests.helpers.machine import need
from tests.helpers.pool import Pool, in_group
from tests.helpers.training import run_changed, run_training, train_model
from tools.own import config_of, load_own
from tools.trained import Trained, read

CPU = torch.device("cpu")
PAGE = (ROOT / "docs" / "bring-your-own.md").read_text()
BEGIN = "How do I train my own model on my own data?"
IMAGES, TEXT = "Images with float targets", "Text"
"""Headings of the page. A block of commands follows each."""


# The page


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository as it is now, in which a user begins a recipe."""
    return copy_of_repository(tmp_path_factory.mktemp("house"))


def commands(heading: str) -> list[str]:
    """The commands that the page gives first below a heading."""
    _, section = re.split(rf"(?m)^#+ {re.escape(heading)}\n", PAGE)
    return section.split("```\n")[1].splitlines()


def type_in(house: Path, lines: list[str]) -> None:
    env = clean_env() | {"PYTHON": sys.executable}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=house, env=env, check=True)


def begin(house: Path, example: str) -> list[str]:
    """Type the page's commands, up to the training of an example; return the training's options.

    The recipe's name is mine, as if the user had chosen it.
    """
    train = house / "recipes" / "mine" / "train.py"
    shutil.rmtree(train.parent, ignore_errors=True)
    type_in(house, commands(BEGIN))
    before = train.read_text().splitlines()
    shutil.rmtree(train.parent)
    new, training = (re.sub(r"RECIPE=\w+", "RECIPE=mine", line) for line in commands(example))
    type_in(house, [new])
    lines = ndiff(before, train.read_text().splitlines())
    assert 0 < sum(line[0] in "+-" for line in lines) <= 30
    words = shlex.split(training)
    assert words[:3] == ["make", "run", "RECIPE=mine"]
    return shlex.split(" ".join(words[3:]).removeprefix("ARGS="))


@contextmanager
def as_in(house: Path) -> Iterator[None]:
    """Import recipes of a house, in whose folder the user is."""
    for name in [name for name in sys.modules if name.startswith("recipes.mine")]:
        del sys.modules[name]  # of another example
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "__path__", [str(house / "recipes")])
        patch.setattr(git, "ROOT", house)
        patch.chdir(house)
        yield


def train_mine(ranks: Ranks, house: Path, arguments: list[str]) -> None:
    """The recipe of a house, as one rank, on code that git knows there."""
    with as_in(house):
        mine: Any = importlib.import_module("recipes.mine.train")
        mine.train(cli.parse("mine", mine.Config, arguments)[1], ranks)


def test_a_recipe_of_ones_own_is_listed_trained_evaluated_and_loaded_as_the_page_says(
    house: Path, recipe: Recipe
) -> None:
    """With samples of three parts, of which the third weights the loss, and with a broken one."""
    given = begin(house, IMAGES)
    mine = house / "recipes" / "mine"
    for file, changes in (
        ("yours.py", {"[x, y, side]) / 16": "[x, y, side]) / 16, 1 + index % 2"}),
        ("yours.py", {"images, places = batch": "images, places, weights = batch"}),
        ("train.py", {"for images, labels in": "for images, labels, weights in"}),
        ("train.py", {"append(loss_function(": "append(weights * loss_function("}),
    ):
        for old, new in changes.items():
            text = (mine / file).read_text()
            assert text.count(old) == 1
            (mine / file).write_text(text.replace(old, new))
    env = {"PYTHONPATH": str(house)}
    listed = recipe.module(env=env).stdout
    assert re.search(r"\n  mine +A copy of ddp_launch, yours to change", listed)
    options = (*given, "--nproc", "1", "--batch-size-per-rank", "96", "--max-steps", "2")
    done = recipe("mine", *options, env=env).assert_ok()
    assert "warning" not in done.stdout + done.stderr
    assert f"{done.folder}/model.pt (how to use it: docs/use.md)" in done.stdout
    again = recipe.module("evaluate", done.folder, "--nproc", "1", "--json", env=env).assert_ok()
    answer = json.loads(again.stdout)
    recorded = ("val_loss", "val_error_px", "val_total", "weights_sha256")
    assert answer == {name: done.summary[name] for name in recorded} | {"held_out": True}
    *_, script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script = script.replace("runs/mine/RUN", str(done.folder))
    script += "assert model(torch.zeros(1, 1, 16, 16)).shape == (1, 3)"
    with as_in(house):
        exec(script, {})

    text = (mine / "yours.py").read_text()
    broken = text.replace(
        "        side, x, y =", '        index == 959 and {}["label"]\n        side, x, y ='
    )
    (mine / "yours.py").write_text(broken)
    failed = recipe("mine", *options[:-2], "--num-workers", "1", folder="failed", env=env)
    assert failed.status == 1
    (line,) = failed.errors
    says = r"rank 0 on \S+: sample 959 of Squares cannot be read \(KeyError: 'label'\): repair it"
    assert re.match(rf"error: {says}", line), line
    assert 'index == 959 and {}["label"]' in failed.stderr, "the traceback shows the user's line"


def test_a_layer_that_is_unfrozen_as_the_page_says_trains_then_and_resumes(
    pool: Pool, tmp_path: Path
) -> None:
    (block,) = re.findall(r"```python\n# optimizer\n(.*)\n(.*)\n# loop\n(.*)\n(.*)\n```", PAGE)
    changes = {
        "optimizer = make_optimizer(model.parameters(), options, scaled=scaler.is_enabled())": (
            "\n        ".join(block[:2])
        ),
        block[2]: f"\n{16 * ' '}".join(block[2:]),
    }
    plan = shlex.split("--epochs 2 --global-batch-size 480 --snapshot-every 1 --keep-snapshots 9")
    for folder, more in (("whole", []), ("cut", ["--max-steps", "3"]), ("cut", [])):
        assert not any(pool.run(run_changed, 2, tmp_path / folder, changes, [*plan, *more]))
    whole, cut = (Result(0, "", "", tmp_path / folder) for folder in ("whole", "cut"))
    assert (cut.summary["resumed_from"], cut.sha) == (3, whole.sha)
    files = sorted((tmp_path / "cut" / "snapshots").glob("step_*.pt"))
    first, second, third = (read_snapshot(file)["parts"]["model"] for file in files[:3])
    layer = "features.0.weight"
    assert torch.equal(first[layer], second[layer])
    assert not torch.equal(second[layer], third[layer])
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


@pytest.mark.slow
def test_images_on_one_process_and_on_two_resumed_give_one_hash_and_a_record(
    house: Path, pool: Pool, recipe: Recipe
) -> None:
    """And `reproduce` names the new file that was changed since."""
    options = [*begin(house, IMAGES), "--virtual-ranks", "2", "--epochs", "2"]
    env = {"PYTHONPATH": str(house)}
    whole = recipe("mine", "--nproc", "1", *options, folder="whole", env=env).assert_ok()
    cut = Result(0, "", "", recipe.tmp_path / "cut")
    options += ["--output-dir", str(cut.folder)]
    pool.run(train_mine, 2, house, [*options, "--max-steps", "13"])
    yours = house / "recipes" / "mine" / "yours.py"
    example = yours.read_text()
    yours.write_text(f"{example}# changed meanwhile\n")
    pool.run(train_mine, 2, house, options)
    assert cut.summary["resumed_from"] == 13
    assert cut.sha == whole.sha
    for run in (whole, cut):
        assert run.summary["val_error_px"] == whole.summary["val_error_px"] < 3
        assert not {"val_accuracy", "val_correct"} & run.summary.keys()
    assert "val_error_px" in whole.stdout
    assert not (whole.folder / "class_indices.json").exists()

    manifest = json.loads((whole.folder / "manifest.json").read_text())
    ours = {f"recipes/mine/{name}.py" for name in ("__init__", "train", "yours")}
    assert manifest["changed_files"].keys() == ours
    assert manifest["git_dirty"]
    assert manifest["start"].items() >= {"folder": str(recipe.tmp_path)}.items()
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\+00:00", manifest["start"]["time"])
    begun, then = (cut.folder / f"changes{at}.diff" for at in ("_until_step_13", ""))
    assert begun.read_bytes() == (whole.folder / "changes.diff").read_bytes()
    assert "\n+# changed meanwhile\n" in then.read_text()
    said = (cut.folder / "logs" / "rank_0.log").read_text()
    assert "resuming from step 13 with another changed_files" in said
    clean = recipe.tmp_path / "clean"
    subprocess.run(["git", "clone", "-q", house, clean], check=True)
    subprocess.run(["git", "apply", begun], cwd=clean, check=True)
    assert (clean / "recipes" / "mine" / "yours.py").read_text() == example

    yours.write_text(example.replace("Dropout(0.1)", "Dropout(0.2)"))
    again = recipe.start(
        *(sys.executable, "-m", "recipes", "reproduce", whole.folder),
        *("--output-dir", recipe.tmp_path / "again"),
        env=env,
    )
    done = recipe.finish(again, recipe.tmp_path)
    assert done.status == 1, done.stderr
    changed = r"changed_files\.recipes/mine/yours\.py"
    assert re.search(rf"  {changed}: \w+\.\.\. in the record, \w+\.\.\. now\n", done.stdout)
    assert re.search(rf"\nlikely cause: {changed} \(\w+\.\.\., now \w+\.\.\.\)", done.stdout)


@pytest.mark.slow
def test_text_on_one_process_and_on_two_resumed_gives_one_hash(
    house: Path, pool: Pool, tmp_path: Path
) -> None:
    """Interrupted in the middle of an epoch."""
    given = begin(house, TEXT)

    def run(world_size: int, folder: str, *options: str) -> dict[str, Any]:
        words = [*given, "--virtual-ranks", "2", "--epochs", "3", *options]
        words += ["--output-dir", str(tmp_path / folder)]
        pool.run(train_mine, world_size, house, words)
        summary: dict[str, Any] = json.loads((tmp_path / folder / "summary.json").read_text())
        return summary

    whole = run(1, "whole")
    steps_per_epoch = whole["steps"] // 3
    assert steps_per_epoch > 1
    run(2, "cut", "--max-steps", str(steps_per_epoch + 1))
    cut = run(2, "cut")
    assert cut["resumed_from"] == steps_per_epoch + 1
    for name in ("weights_sha256", "train_loss", "val_loss", "val_right"):
        assert cut[name] == whole[name], name


# Data sets of others


class Dicts(Dataset[dict[str, Any]]):
    """A data set that returns dicts of integers and strings, and draws from every generator."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return {"tokens": np.full(5, 300 + index), "drawn": drawn, "name": f"sample {index}"}


class Points(Dataset[tuple[Tensor, float]]):
    """A data set with float targets."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.full((3,), float(index)), index / 2


def numbers_of(batch: Any) -> list[Any]:
    """A batch as plain numbers, sample by sample."""
    parts = [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
    return list(zip(*(part.reshape(len(part), -1).tolist() for part in parts), strict=True))


def loaded(ranks: Ranks, source: Any, workers: int) -> tuple[list[Any], list[str]]:
    """One epoch's samples of this rank as it sees them, and the types in a batch."""
    samples = Samples(source, range(len(source)), 7)
    data, options = Data(samples, samples, "90"), LoaderOptions(num_workers=workers)
    sizes = [30 // ranks.world_size] * ranks.world_size
    loader, _ = rank_loaders(data, options, sizes, 7, ranks.rank, CPU, torch.float32, Path())
    loader.keys.set_epoch(1)
    found = list(loader)
    kinds = [str(part.dtype) for part in tree_leaves(found[0]) if isinstance(part, Tensor)]
    return list(chain(*map(numbers_of, found))), kinds


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (FakeData(90, (3, 8, 8), 10, v2.PILToTensor()), ["torch.uint8", "torch.int64"]),
        (Dicts(), ["torch.int64", *["torch.float32"] * 3]),
        (Points(), ["torch.float32", "torch.float32"]),
    ],
    ids=["FakeData", "dicts", "float targets"],
)
def test_a_data_set_of_others_is_loaded_as_it_is(pool: Pool, source: Any, kinds: list[str]) -> None:
    """The same samples on any number of ranks and processes; integers stay integers."""
    ((whole, found),) = pool.run(in_group, 1, loaded, source, 0)
    assert found == kinds
    for workers in (0, 2):
        parts = pool.run(in_group, 2, loaded, source, workers)
        assert sorted(chain(*(part for part, _ in parts))) == sorted(whole)
        assert len(whole) == 90


def test_draws_from_any_generator_depend_on_the_key_alone() -> None:
    samples = Samples(Dicts(), range(90), 7)
    first = samples.__getitems__([(2, 5), (2, 6)])["drawn"]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = rng_state()
    again = samples.__getitems__([(2, 5)])["drawn"]
    assert [draw[0] for draw in first] == [draw[0] for draw in again]
    assert all(draw[0] != draw[1] for draw in first), "each sample has its own draws"
    other = samples.__getitems__([(3, 5)])["drawn"]
    assert all(a[0] != b[0] for a, b in zip(first, other, strict=True)), "each epoch, too"
    assert str(rng_state()) == str(before), "the training's generators are left as they were"


class Broken(Dataset[Any]):
    """Sample 7 is broken."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        size = 5 if index == 7 and self.fault == "ragged" else 3
        if index == 7 and self.fault == "none":
            return None
        if index == 7 and self.fault == "raises":
            raise KeyError("label")
        label = None if index == 7 and self.fault == "none inside" else 1
        return torch.zeros(size), label


@pytest.mark.parametrize("by_process", [False, True])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none", "sample 7 of Broken is None: let __getitem__ return .* leave this index out"),
        ("raises", r"sample 7 of Broken cannot be read \(KeyError: 'label'\): repair it, or"),
        (
            "ragged",
            r"samples 4 and 7 of Broken do not fit into one batch: they are \[\(3,\) float32, "
            r"int\] and \[\(5,\) float32, int\]; return samples of one shape, or .* pads",
        ),
        ("none inside", r"sample 7 of Broken makes no batch .* \[\(3,\) float32, NoneType\]; let"),
    ],
)
def test_a_broken_sample_is_named_with_its_index_and_rank(
    capfd: pytest.CaptureFixture[str], fault: str, says: str, by_process: bool
) -> None:
    """Its index in the data set, not its place in the split; also if a loading process finds it."""
    samples = Samples(Broken(fault), range(4, 10), 0)

    def load() -> None:
        try:
            samples.__getitems__([(0, 0), (0, 3)])
        except TrainingError:
            if by_process:  # torch hands it over to the rank like this
                ExceptionWrapper(where="in DataLoader worker process 0").reraise()
            raise

    with pytest.raises(TrainingError) as raised:
        load()
    assert report(raised.value, Ranks(rank=3, world_size=4)) == 1
    said = capfd.readouterr().err
    lines = said.splitlines()
    assert re.match(rf"error: rank 3 on \S+: {says}", lines[0]), said
    assert ("in __getitem__" in said) == (fault == "raises"), "the user's line"
    assert (len(lines) == 1) == (fault == "none")


def test_batches_with_texts_are_cut_into_parts() -> None:
    """As default_collate makes them: a list of names, and a tuple for each of two texts."""
    batch = Samples(Dicts(), range(90), 7).__getitems__([(0, index) for index in range(6)])
    pairs = [tuple("abcdef"), tuple("uvwxyz")]
    first, last = chunks((batch, pairs, ()), 2)
    for (part, two, _), indices in ((first, range(3)), (last, range(3, 6))):
        assert part["name"] == [f"sample {index}" for index in indices]
        assert part["tokens"][:, 0].tolist() == [300 + index for index in indices]
        assert two == [tuple(text[index] for index in indices) for text in pairs]
    words = [["a", "b", "c"], ["d", "e"], [], ["f"]]
    assert chunks([torch.zeros(4), words], 2)[1][1] == words[2:]
    for wrong in ("text", 3, None, ["a", "b"], torch.zeros(()), [list("abcd")] * 4):
        with pytest.raises(TrainingError, match=r"a batch holds .* cannot cut: let the collate"):
            chunks([torch.zeros(4, 2), wrong], 2)


def test_errors_of_a_recipe_that_does_not_fit_its_samples_say_so() -> None:
    sample: Any = (1, 2, 3)
    with pytest.raises(ValueError, match="values to unpack") as too_many:
        _image, _label = sample
    assert "as in images, labels, weights" in hint(str(too_many.value))
    with pytest.raises(RuntimeError) as scalar:
        torch.cat([torch.zeros(())])
    assert "give it reduction='none'" in hint(str(scalar.value))


@pytest.mark.parametrize("loss", [cross_entropy, mse_loss, l1_loss])
def test_a_mean_over_the_batch_is_not_taken_for_the_losses_of_samples(
    caplog: pytest.LogCaptureFixture, loss: Callable[..., Tensor]
) -> None:
    model, weights = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.rand(6)
    targets = torch.rand(6, 4)

    def said(losses: Tensor) -> str:
        caplog.clear()
        losses.sum().backward()  # as in a recipe: the graph is used up
        warn_of_graph(losses)
        return caplog.text

    with caplog.at_level("WARNING", log.name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "propagate", True)
        single = loss(model(torch.rand(6, 3)), targets, reduction="none").view(6, -1).mean(1)
        assert not said(weights * single)
        assert not said(loss(model(torch.rand(6, 3)), targets)), "a mean is what it says"
        wrong = said(weights * loss(model(torch.rand(6, 3)), targets))
    if loss is not cross_entropy:  # torch takes its mean of probabilities with a plain sum
        assert "weights of single samples have no effect on it; give reduction='none'" in wrong


def test_losses_must_be_one_per_sample_or_a_mean() -> None:
    for right in (torch.zeros(6), torch.zeros(6, 1), torch.zeros(())):
        refuse_other_losses(right, 6)
    refuse_other_losses(torch.zeros(1), 1)
    of_weights = torch.ones(6, 1) * torch.zeros(6)
    for wrong in (torch.zeros(24), torch.zeros(1), torch.zeros(6, 3), of_weights):
        shape = re.escape(str(tuple(wrong.shape)))
        with pytest.raises(TrainingError, match=rf"shape {shape} for 6 samples: give red.*\(6,\)"):
            refuse_other_losses(wrong, 6)


@pytest.mark.parametrize(
    ("collate", "gave"),
    [
        (lambda samples: default_collate(samples[1:]), r"tensors of the shapes \(5, 3\), \(5,\)"),
        (lambda samples: default_collate(samples[:1]), r"tensors of the shapes \(1, 3\), \(1,\)"),
        (lambda samples: default_collate(samples * 2), r"tensors of the shapes \(12, 3\), \(12,\)"),
        (lambda samples: None, "no tensor"),
    ],
)
def test_a_collate_function_that_loses_or_doubles_samples_is_named(
    collate: Callable[[list[Any]], Any], gave: str
) -> None:
    samples = Samples([(torch.zeros(3), 0)] * 8, range(8), 0, collate)
    with pytest.raises(SampleError, match=f"of list got 6 samples and gave {gave}: it must"):
        samples.__getitems__([(0, index) for index in range(6)])


def train_with_loss(ranks: Ranks, folder: Path, kind: str) -> None:
    """ddp_launch with the losses of one sample only in the second step, or of all pairs."""
    steps = itertools.count(1)

    class Loss(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            if kind == "all pairs":  # (samples, 1) and (samples,)
                return mse_loss(outputs[:, :1], labels.float(), reduction="none").mean(1)
            losses = super().forward(outputs, labels)
            return losses[:1] if next(steps) == 2 else losses

    with patch.object(ddp_launch, "cross_entropy_of_samples", lambda *_: Loss(reduction="none")):
        run_training(ranks, folder, {})


def test_losses_of_other_samples_end_the_run_in_any_step(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"losses of shape \(1,\) for 96 samples"):
        pool.run(train_with_loss, 1, tmp_path / "one", "one sample")
    with pytest.raises(UserWarning, match="Using a target size") as caught:
        pool.run(train_with_loss, 1, tmp_path / "pairs", "all pairs")
    assert "outputs the same shape" in hint(str(caught.value))


def test_bytes_are_images_only_if_the_data_say_how_they_are_normalised() -> None:
    source = [(torch.full((3, 2, 2), 255, dtype=torch.uint8), 0)] * 40
    samples = Samples(source, range(40), 0)
    for mean, expected in (((0.5,) * 3, torch.float32), ((), torch.uint8)):
        data = Data(samples, samples, "255", mean=mean, std=mean)
        arguments = (LoaderOptions(), [40], 0, 0, CPU, torch.float32, Path())
        images, _ = next(iter(rank_loaders(data, *arguments)[0]))
        assert images.dtype == expected
        assert images.unique().item() == (1 if mean else 255)


def test_data_without_samples_or_without_a_fingerprint_are_refused() -> None:
    some, none = Samples([0], [0], 0), Samples([0], [], 0)
    for train, val, fingerprint, says in (
        (none, some, "x", "no samples in Data.train"),
        (some, none, "x", "no samples in Data.val"),
        (some, some, "", "Data.fingerprint is ''"),
        (some, some, 7, "Data.fingerprint is 7"),
    ):
        with pytest.raises(InputError, match=says):
            Data(train, val, fingerprint)  # type: ignore[arg-type] # as an untyped recipe does


def test_masks_that_are_bytes_stay_as_they_are() -> None:
    image, mask = torch.full((3, 3, 4, 4), 255, dtype=torch.uint8), torch.ones(3, 3, 4, 4).byte()
    prepare = DeviceBatches([], CPU, torch.float64, (0.5,) * 3, (0.5,) * 3).prepare
    for batch in ((image, mask), [image, {"mask": mask}], {"image": image, "mask": mask}):
        (ours, kept) = tree_leaves(prepare(batch))
        assert (ours.dtype, ours.unique().item()) == (torch.float64, 1)
        assert kept is mask
    label, pixels = prepare((torch.arange(3), image))
    assert (label.dtype, pixels.dtype) == (torch.int64, torch.uint8), "only the first tensor"


@pytest.mark.parametrize(
    "labels",
    [torch.arange(300), torch.rand(300), torch.rand(300, 4), torch.arange(600).view(300, 2)],
)
def test_targets_in_memory_are_of_any_type_and_shape(labels: Tensor) -> None:
    numbers = torch.arange(600).view(300, 2)
    samples = ArraySamples([numbers, labels], range(300), 0)
    assert samples.digest() != ArraySamples([numbers, labels.flip(0)], range(300), 0).digest()
    inputs, targets = next(iter(make_loader(samples, [[(0, 7), (0, 299)]])))
    assert torch.equal(inputs, numbers[[7, 299]])
    assert torch.equal(targets, labels[[7, 299]])
    assert torch.equal(samples[(0, 299)][1], labels[299])


# Models of others


class Turned(nn.Module):
    """Turns pixels by complex numbers, of which some are trained."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(64), torch.arange(64) * 0.3))
        self.factors = nn.Parameter(torch.ones(64, dtype=torch.complex64))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head((images.flatten(1) * self.turns * self.factors).imag)
        return logits


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_complex_numbers_of_a_model_stay_complex(
    pool: Pool, tmp_path: Path, precision: str
) -> None:
    """In training, in model.pt and in `evaluate`."""
    options = {"run": {"precision": precision}, "optimizer": {"max_steps": 3}}
    pool.run(train_model, 2, tmp_path, Turned, options)
    run = Result(0, "", "", tmp_path)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert weights_sha256(weights) == run.sha
    kind = {"fp32": torch.complex64, "fp64": torch.complex128}[precision]
    assert weights["turns"].dtype == weights["factors"].dtype == kind
    assert weights["turns"].imag.any()
    assert weights["factors"].imag.any(), "it is trained"
    recipe = SimpleNamespace(
        Config=ddp_launch.Config, own_model=lambda _: Turned(), __name__="recipes.own.train"
    )

    def again(ranks: Ranks) -> float:
        parts = load_own(recipe, read(tmp_path, own=True), None, ranks, CPU)
        batches = DeviceBatches(
            make_loader(parts.val, FixedBatches(len(parts.val), 32, 0, 1)), CPU, parts.dtype
        )
        return evaluate(parts.model, batches, len(parts.val)).means["loss"]

    assert in_group(Ranks(), again) == run.summary["val_loss"]


class Counted(nn.Module):
    """Counts its steps, and keeps a moving average, in buffers that forward assigns anew."""

    steps: Tensor
    inner: Any

    def __init__(self) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(64, 10), nn.Module()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.inner.register_buffer("average", torch.zeros(10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        if self.training:
            self.steps = self.steps + 1
            self.inner.average = 0.9 * self.inner.average + 0.1 * logits.detach().mean(0)
        shifted: Tensor = logits + self.inner.average
        return shifted


def test_buffers_that_forward_assigns_are_exact(pool: Pool, tmp_path: Path) -> None:
    """The warm-up leaves no trace, and virtual ranks lose nothing; also in a resumed run."""

    def run(world_size: int, folder: str, shards: int, *until: int) -> str:
        for steps in until:
            options = {"parallel": {"virtual_ranks": shards}, "optimizer": {"max_steps": steps}}
            pool.run(train_model, world_size, tmp_path / folder, Counted, options)
        weights = torch.load(tmp_path / folder / "model.pt", weights_only=True)
        assert weights["steps"] == 5
        assert weights["inner.average"].any()
        return Result(0, "", "", tmp_path / folder).sha

    assert run(1, "plain", 0, 5) == run(1, "plain cut", 0, 2, 5)
    assert run(1, "one", 2, 5) == run(2, "two", 2, 5) == run(2, "two cut", 2, 2, 5)


class Versioned(Counted):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_a_state_that_is_no_tensor_is_refused_before_training(pool: Pool, tmp_path: Path) -> None:
    says = r"holds _extra_state, which is no tensor \(dict\): keep it in a buffer"
    with pytest.raises(InputError, match=says):
        pool.run(train_model, 1, tmp_path, Versioned, {})


# Evaluation and options


def absolute_error(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"error": (model(inputs)[:, 0] - targets).abs()}


def evaluated(ranks: Ranks, score: Callable[..., Any], wrap: bool) -> dict[str, float]:
    """Of a model with dropout, in train mode before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).train()
    samples = Samples(Points(), range(90), 0)
    data, options = Data(samples, samples, "90"), LoaderOptions()
    sizes = [30 // ranks.world_size] * ranks.world_size
    _, loader = rank_loaders(data, options, sizes, 0, ranks.rank, CPU, torch.float32, Path())
    function: Any = (lambda inputs: model(inputs)) if wrap else model
    result = evaluate(function, loader, 90, score=score)
    assert model.training
    assert result.total == 90
    return result.means


def test_an_own_metric_is_exact_on_any_number_of_ranks(pool: Pool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    inputs, targets = zip(*(Points()[i] for i in range(90)), strict=True)
    expected = (layer(torch.stack(inputs))[:, 0] - torch.tensor(targets)).abs().mean().item()
    found = [
        means
        for world_size in (1, 2, 3)
        for means in pool.run(in_group, world_size, evaluated, absolute_error, False)
    ]
    assert all(means == found[0] for means in found)
    assert found[0] == {"error": pytest.approx(expected)}, "without dropout"


def mean_error(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return {"error": absolute_error(model, batch)["error"].mean()}


def mixed_scores(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return absolute_error(model, batch) | {"loss": absolute_error(model, batch)["error"].mean()}


def two_per_sample(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return {"error": absolute_error(model, batch)["error"].repeat(2)}


def test_what_would_be_wrong_in_silence_is_refused(pool: Pool) -> None:
    with pytest.raises(TypeError, match="to switch to eval mode"):
        pool.run(in_group, 1, evaluated, absolute_error, True)
    with pytest.raises(ValueError, match="one number for each sample"):
        pool.run(in_group, 1, evaluated, mean_error, False)
    with pytest.raises(ValueError, match=r"got the shapes \{'error': \(32,\), 'loss': \(\)\}"):
        pool.run(in_group, 1, evaluated, mixed_scores, False)
    with pytest.raises(ValueError, match="gave 180 numbers per metric for 90 samples"):
        pool.run(in_group, 1, evaluated, two_per_sample, False)


def two_errors(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return absolute_error(model, batch) | {"squared": absolute_error(model, batch)["error"] ** 2}


def in_any_order(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    scores = two_errors(model, batch)
    return scores if len(batch[0]) == 32 else dict(reversed(scores.items()))


def called_total(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return {"total": absolute_error(model, batch)["error"]}


def sometimes_another(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    return two_errors(model, batch) if len(batch[0]) == 32 else absolute_error(model, batch)


def test_metrics_go_by_their_names(pool: Pool) -> None:
    """In one rank's batches, and where only the last rank has the small batch."""
    for world_size in (1, 3):
        found = pool.run(in_group, world_size, evaluated, in_any_order, False)
        assert found == pool.run(in_group, world_size, evaluated, two_errors, False)
        with pytest.raises(TrainingError, match=r"score gave the metrics error.*the same"):
            pool.run(in_group, world_size, evaluated, sometimes_another, False)
    with pytest.raises(TrainingError, match=r"called total, but val_total .* another name"):
        pool.run(in_group, 1, evaluated, called_total, False)


def test_a_metric_whose_name_is_no_text_is_named() -> None:
    """JSON would write 5 and "5" as one name."""

    def found(_ranks: Ranks) -> Evaluation:
        def score(_model: nn.Module, batch: Tensor) -> Any:
            return {5: batch, "5": batch}

        return evaluate(nn.Identity(), torch.arange(9.0).split(3), 9, score=score)

    with pytest.raises(TrainingError, match="a metric called 5, which is no text: call it '5'"):
        in_group(Ranks(), found)


@pytest.mark.parametrize(("share", "correct"), [(1.0, 45), (0.5, None)])
def test_samples_are_counted_as_correct_only_if_each_is_right_or_wrong(
    share: float, correct: int | None
) -> None:
    def score(_model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"accuracy": share * (batch % 2)}

    def found(_ranks: Ranks) -> Evaluation:
        return evaluate(nn.Identity(), torch.arange(90.0).split(32), 90, score=score)

    assert in_group(Ranks(), found) == Evaluation({"accuracy": share / 2}, 90, correct)


@pytest.mark.parametrize("label", [-100, -1, 4])
def test_a_label_that_is_no_class_counts_no_loss(label: int) -> None:
    batch = torch.zeros(3, 4), torch.tensor([0, label, 3])
    with pytest.raises(IndexError) as said:
        score_classes(nn.Identity(), batch)
    assert "labels are 0 to classes - 1" in hint(str(said.value))


class TwoInputs(nn.Module):
    """Takes a dict, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        features = self.embedding(batch["tokens"])
        return {"logits": self.head(features), "positions": batch["tokens"]}


def test_a_model_of_dicts_can_be_warmed_up() -> None:
    model = TwoInputs()
    warm_up(model, {"tokens": Samples(Dicts(), range(90), 0)[(0, 0)]["tokens"]}, 4)
    assert all(parameter.grad is None for parameter in model.parameters())


@dataclass(frozen=True)
class OwnOptions:
    """Options of a new recipe."""

    text: Path
    """A file."""
    width: int = 3
    """Width [features]."""


@dataclass(frozen=True)
class OwnConfig:
    """All options."""

    own: "OwnOptions"
    run: RunOptions = field(default_factory=RunOptions)


def test_an_option_group_needs_no_default() -> None:
    config = cli.parse("own", OwnConfig, ["--text", "a.txt", "--seed", "3"])[1]
    assert (config.own, config.run.seed) == (OwnOptions(Path("a.txt")), 3)
    assert decisive(flatten(config), config)["text"] == "a.txt"
    assert {"text", "width", "seed"} <= decisive({}, OwnConfig).keys()
    with pytest.raises(InputError, match="--text PATH"):
        cli.parse("own", OwnConfig, ["--width", "4"])


@dataclass(frozen=True)
class TrainedConfig:
    """All options."""

    own: OwnOptions
    run: RunOptions = field(default_factory=RunOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)


def test_what_evaluate_gives_to_own_functions_is_the_config_of_the_run() -> None:
    given = ["--text", "a.txt", "--output-dir", "run", "--batch-size-per-rank", "8", "--lr", "0.2"]
    config = cli.parse("own", TrainedConfig, given)[1]
    resolved = {**flatten(config), "global_batch_size": 16, "device": "cpu", "recipe": "own"}
    run = Trained(Path("run"), json.loads(json.dumps(resolved)), {}, {}, {})
    found = config_of(SimpleNamespace(Config=TrainedConfig), run)
    assert (found.own, found.optimizer) == (config.own, config.optimizer)
    assert found.run == replace(config.run, device="cpu")


def test_the_diff_leaves_out_runs_secrets_and_what_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them but the run are in the list of changed files."""
    monkeypatch.setattr(git, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("a file.py", ".env", "key.pem", "binary", "large.txt", "run/.lock", "run/log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "large.txt").write_text("x" * (2**20 + 1))
    (tmp_path / "link").symlink_to("/dev/zero")
    names = {"a file.py", ".env", "key.pem", "binary", "large.txt", "link"}
    assert git.changed_files().keys() == names
    header = b"--- /dev/null\n+++ b/a file.py\t\n@@ -0,0 +1,1 @@\n"
    assert git.changes() == header + b"+x = 1\n\\ No newline at end of file\n"
    (tmp_path / "a file.py").write_text('token: str = f"{user}abc"')
    assert git.changes() == header + b"+token: str = ***\n\\ No newline at end of file\n"
    for words in ("add -f .env", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    (tmp_path / ".env").write_text("y = 2")
    assert ".env" in git.changed_files()
    assert b"+++ b/a file.py" in git.changes()
    assert b".env" not in git.changes()
    (tmp_path / "large.txt").write_text("x\n" * 2**19)
    assert len(git.changes()) < 2**20 + 100
    assert git.changes().endswith(b"\ncut here: too long\n")


@pytest.mark.parametrize("name", ["predict", "class", "Mine", "a-b", ""])
def test_a_name_that_no_recipe_can_have_is_refused(name: str) -> None:
    """`python -m recipes predict` is the tool, and no module can be imported by the name class."""
    need("make")
    command = ["make", "-s", "new", f"RECIPE={name}"]
    done = subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: RECIPE={name} is ")
    assert not name or not (ROOT / "recipes" / name).exists()
