"""What `evaluate` says of a classifier's errors is what scikit-learn says of its answers."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import Tensor

from common.data.datasets import DataOptions, digits_data
from common.data.image_folder import ImageFiles
from common.data.packed import PackedImages
from common.data.stream import Samples
from common.launch.ranks import Ranks
from common.training.models import build_model
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import need
from tests.helpers.pool import Pool, call_main, call_tool
from tools import evaluate
from tools.mistakes import SHOWN, Result, name_of
from tools.trained import read

CPU = torch.device("cpu")
OPTIONS = "--epochs 3 --num-workers 0 --cpu-threads 1 --output-dir"


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits whose best epoch was not its last one."""
    folder = tmp_path_factory.mktemp("mistakes") / "run"
    (answer,) = pool.run(
        call_main, 1, "ddp_launch", ["--nproc", "1", *OPTIONS.split(), str(folder)]
    )
    assert answer[0] == 0, answer
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert best["epochs"] < 3
    return folder


def evaluated(pool: Pool, world_size: int, run: Path, *words: str | Path) -> Any:
    """The answer of --json."""
    given = [str(run), "--json", "--num-workers", "0", *map(str, words)]
    status, printed, said = pool.run(call_tool, world_size, "tools.evaluate", given)[0]
    assert status == 0, said
    return json.loads(printed)


def refusal(pool: Pool, *words: str | Path) -> str:
    given = list(map(str, words))
    status, printed, said = pool.run(call_tool, 1, "tools.evaluate", given)[0]
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert (status, "{" in printed) == (2, False), said
    return str(line)


def asked_directly(run: Path, weights: str = "model.pt") -> tuple[Tensor, Tensor, Any]:
    """True classes and probabilities of all held-out digits, and their indices, in one batch."""
    val = digits_data(DataOptions(), 0).val
    model, _ = read(run).model(run / weights, CPU)
    images, labels = val.__getitems__([(0, place) for place in range(len(val))])
    with torch.no_grad():
        return labels, model(images).double().softmax(1), val.indices


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_confusions_and_mistakes_are_those_of_the_gathered_answers_on_any_number_of_ranks(
    pool: Pool, run: Path, tmp_path: Path, world_size: int
) -> None:
    labels, chances, indices = asked_directly(run)
    predicted = chances.argmax(1)
    found = evaluated(pool, world_size, run, "--output", tmp_path)
    assert found["confusion"] == confusion_matrix(labels, predicted, labels=range(10)).tolist()
    assert len(labels) == found["val_total"] == sum(entry["count"] for entry in found["classes"])
    for number, entry in enumerate(found["classes"]):
        of_class = predicted[labels == number]
        right = int((of_class == number).sum())
        expected = {"class": str(number), "count": len(of_class), "correct": right}
        assert entry == {**expected, "accuracy": right / len(of_class)}
    mistakes = lines_of(tmp_path / "mistakes.jsonl")
    wrong = (labels != predicted).nonzero()[:, 0].tolist()
    assert len(mistakes) == len(wrong) > 20
    told = {entry["sample"]: entry for entry in mistakes}
    for place in wrong:
        entry = told[int(indices[place])]
        assert entry["class"] == str(labels[place].item())
        assert entry["predicted"] == str(predicted[place].item())
        assert entry["probability"] == pytest.approx(float(chances[place].max()), abs=1e-6)
    order = [entry["probability"] for entry in mistakes]
    assert order == sorted(order, reverse=True), "the most confident one first"
    evaluated(pool, 1, run, "--output", tmp_path / "alone")
    alone = (tmp_path / "alone" / "mistakes.jsonl").read_bytes()
    assert (tmp_path / "mistakes.jsonl").read_bytes() == alone


def test_the_best_epochs_weights_are_evaluated_and_predict(
    pool: Pool, run: Path, tmp_path: Path
) -> None:
    summary = json.loads((run / "summary.json").read_text())
    found = evaluated(pool, 2, run, "--best", "--output", tmp_path)
    assert found["weights_sha256"] == summary["best"]["weights_sha256"] != summary["weights_sha256"]
    assert found["val_accuracy"] == summary["best"]["val_accuracy"] > summary["val_accuracy"]
    image = tmp_path / "one.png"
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8)).astype(np.uint8)
    Image.fromarray(pixels).save(image)
    shown = {}
    for words in ([], ["--best"], ["--weights", str(run / "best.pt")]):
        given = [str(run), str(image), "--json", *words]
        ((status, printed, said),) = pool.run(call_tool, 1, "tools.predict", given)
        assert status == 0, said
        shown["".join(words[:1])] = json.loads(printed)
    assert shown["--best"] == shown["--weights"] != shown[""]
    wrapped, own = tmp_path / "wrapped.pt", torch.load(run / "best.pt")
    torch.save({f"backbone.{name}": value for name, value in own.items()}, wrapped)
    says = f"{wrapped}: backbone. is taken off all names\n"
    given = [str(run), str(image), "--json", "--weights", str(wrapped)]
    ((status, printed, said),) = pool.run(call_tool, 1, "tools.predict", given)
    assert (status, json.loads(printed), said.count(says)) == (0, shown["--best"], 1), said
    given = [str(run), "--json", "--weights", str(wrapped), "--output", str(tmp_path)]
    answers = pool.run(call_tool, 2, "tools.evaluate", given)
    assert json.loads(answers[0][1]) == found
    assert "".join(said for *_, said in answers).count(says) == 1
    both = ("--best", "--weights", run / "model.pt")
    assert "not allowed with argument" in refusal(pool, run, *both)
    without = shutil.copytree(run, tmp_path / "without")
    del summary["best"]
    (without / "summary.json").write_text(json.dumps(summary))
    assert "has no best.pt: no epoch was evaluated" in refusal(pool, without, "--best")


def test_make_evaluate_shows_where_the_model_errs_and_the_run_stays_a_run(
    recipe: Recipe, run: Path, tmp_path: Path
) -> None:
    need("make")
    copy = shutil.copytree(run, tmp_path / "run")
    words = ("-C", ROOT, f"RUN={copy}", "NPROC=2", "ARGS=--sheet")
    shown = recipe.finish(recipe.start("make", "evaluate", *words), tmp_path).assert_ok().stdout
    labels, chances, _ = asked_directly(run)
    matrix = confusion_matrix(labels, chances.argmax(1), labels=range(10))
    for number, cells in enumerate(matrix.tolist()):
        (line,) = re.findall(rf"(?m)^  {number}  .*$", shown)
        assert line.replace(".  ", "0  ").split()[:2] == [str(number), str(sum(cells))]
        assert [int(n.replace(".", "0")) for n in line.split()[3:]] == cells
    assert "the same as in summary.json, to the bit" in shown
    evaluation = copy / "evaluation"
    assert f"{evaluation}: confusion.png, mistakes.jsonl, worst.png\n" in shown
    with Image.open(evaluation / "worst.png") as sheet, Image.open(evaluation / "confusion.png"):
        assert min(sheet.size) > 1000
    (copy / "model.pt").unlink()
    again = recipe("ddp_launch", *OPTIONS.split()[:-1], "--nproc", "1").assert_ok()
    assert again.summary["resumed_from"], "the run goes on in its folder"
    assert (copy / "model.pt").read_bytes() == (run / "model.pt").read_bytes()


def test_files_that_cannot_be_written(pool: Pool, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    (copy / "evaluation").write_text("mine")
    assert evaluated(pool, 1, copy)["val_total"] == 360, "the result is shown"
    assert (copy / "evaluation").read_text() == "mine"
    where = copy / "evaluation" / "below"
    assert f"--output {where} cannot be made or written (Not a directory)" in refusal(
        pool, copy, "--output", where
    )


def by_own_model(ranks: Ranks, arguments: list[str]) -> tuple[int, str, str]:
    """`evaluate` of a recipe with an own model, which has the run's weights."""
    own = SimpleNamespace(
        Config=ddp_launch.Config,
        own_model=lambda config: build_model(config.model, 1, 10, 8),
        __name__="recipes.own.train",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "recipe_of", lambda _: own)
        return call_tool(ranks, "tools.evaluate", arguments)


def test_an_own_model_is_told_its_errors_too(pool: Pool, run: Path, tmp_path: Path) -> None:
    given = [str(run), "--json", "--output", str(tmp_path)]
    status, printed, said = pool.run(by_own_model, 2, given)[0]
    assert status == 0, said
    assert json.loads(printed) == evaluated(pool, 1, run, "--output", tmp_path / "by")
    mine, theirs = (folder / "mistakes.jsonl" for folder in (tmp_path, tmp_path / "by"))
    assert mine.read_bytes() == theirs.read_bytes()


def test_a_sample_is_called_by_its_file_where_the_data_know_it() -> None:
    pack: Any = SimpleNamespace(listing=SimpleNamespace(names=["a/1.jpg", "b/2.jpg"]))
    as_torchvision = SimpleNamespace(samples=[("x/1.jpg", 0), ("x/2.jpg", 1)])
    own_table = SimpleNamespace(samples=torch.zeros(2, 3))
    for source, expected in (
        (PackedImages(pack, torch.clone), {"file": "b/2.jpg"}),
        (
            ImageFiles([(Path("p/1.jpg"), 0), (Path("p/2.jpg"), 1)], torch.clone),
            {"file": "p/2.jpg"},
        ),
        (as_torchvision, {"file": "x/2.jpg"}),
        (own_table, {"sample": 1}),
        ([5, 6], {"sample": 1}),
    ):
        assert name_of(Samples(source, [1], 0), 0) == expected


def test_of_many_classes_the_most_frequent_confusions_are_shown() -> None:
    rng = np.random.default_rng(0)
    true, other = rng.integers(0, 30, (2, 2000))
    predicted = np.where(rng.random(2000) < 0.6, true, other // 3)
    names = [f"name {number}" for number in range(30)]
    result = Result(names, true, predicted, rng.random(2000))
    matrix = confusion_matrix(true, predicted, labels=range(30))
    assert result.matrix.tolist() == matrix.tolist()
    np.fill_diagonal(matrix, 0)
    most = sorted(matrix.ravel(), reverse=True)[:SHOWN]
    assert [count for count, *_ in result.confusions] == most
    for entry in result.content["confusions"]:
        place = names.index(entry["class"]), names.index(entry["predicted"])
        assert matrix[place] == entry["count"]
    assert "confusion" not in result.content
    assert len(result.content["classes"]) == 30
    shown = "\n".join(result.lines())
    lowest = min(result.by_class, key=lambda row: row["accuracy"])
    first = shown.splitlines()[1]
    assert lowest["class"] in first
    assert f"{lowest['accuracy']:.4f}" in first
    count, row, column = result.confusions[0]
    assert f"{count}  {row} name {row}, {column} name {column}" in shown


def test_a_class_without_samples_has_no_accuracy() -> None:
    result = Result(["a", "b$^$"], np.zeros(4, int), np.zeros(4, int), np.ones(4))
    assert result.by_class[1] == {"class": "b$^$", "count": 0, "correct": 0, "accuracy": None}
    assert any(re.match(r"  1 b\$\^\$ +0 +- ", line) for line in result.lines())
    assert not result.wrong.size
