"""What is read back of a run: every run made on a GPU, and no damaged file without its name."""

import itertools
import json
import logging
import os
import re
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
from PIL import Image

from common.errors import InputError
from common.launch.ranks import Ranks
from common.parse import parse
from common.run.begin import announce
from common.run.folder import Run
from common.run.options import RunOptions
from common.training import LossOptions
from common.training.models import ModelOptions, build_model
from recipes.__main__ import recipes
from recipes.ddp_launch.train import Config
from tests.helpers.commands import ROOT
from tests.helpers.images import flowers
from tests.helpers.pool import Pool, call_main, call_tool, in_group
from tests.helpers.run_folders import a_run, summary
from tools import evaluate, predict, reproduce, runs, trained
from tools.recorded import options_of, read_record

H200 = ROOT / "tests" / "data" / "h200"
"""Records of runs on a GPU (README.txt there)."""
FOLDERS = [path.parent for path in sorted(H200.glob("*/summary.json"))]
CLASSIFIERS = ["compile", "cpu", "ddp_spawn", "dp_resnet50", "fp16", "photos", "photosf", "stop"]
ALIKE = ("cpu", "photos", "stop")
"""Each is like another one, apart from its precision or device."""


def assert_options_accept(folder: Path) -> None:
    """Each value is one that the recipe's own parser of options accepts, and means the same."""
    config = read_record(folder / "config.json")
    kinds = get_type_hints(import_module(f"recipes.{config['recipe']}.train").Config).values()
    for kind in kinds:
        if kind is LossOptions and folder in FOLDERS:  # it is newer
            continue
        for name, value in asdict(options_of(folder, config, kind)).items():
            then = config.get(name) if name == "patience" else config[name]  # newer than FOLDERS
            assert json.dumps(value, default=str) == json.dumps(then), name


GIVEN = {
    "dp_resnet50": ["--device-ids", "0", "1"],
    "dp_scratch": ["--devices", "cuda:1", "cuda:0"],
    "model_parallel_toy": ["--devices", "cuda:0", "cuda:1"],
}


def records_of_a_gpu(ranks: Ranks, folder: Path) -> list[Path]:
    """The folders of runs of all recipes, as far as each records its options on two GPUs."""
    found = []
    for name in recipes():
        train = import_module(f"recipes.{name}.train")
        if "run" not in get_type_hints(train.Config):
            continue
        words = ["--device", "cuda", "--output-dir", str(folder / name), *GIVEN.get(name, ())]
        run = Run(name, parse(name, train.Config, words)[1], ranks, torch.device("cpu"))
        run.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        run._write_record({"changed_files": []}, 0, 96)
        found.append(run.folder)
    return found


def test_all_values_that_a_gpu_records_are_values_of_the_options(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    (found,) = pool.run(in_group, 1, records_of_a_gpu, tmp_path)
    assert len(found) == 7
    for folder in (*found, *FOLDERS):
        assert_options_accept(folder)
    for folder in found:
        assert json.loads((folder / "config.json").read_text())["backend"] == "nccl"
    with caplog.at_level(logging.INFO, "recipes"):
        announce("x", RunOptions(), Ranks(), torch.device("cuda"))
    assert "device cuda, backend nccl, bf16" in caplog.text


def weights_for(run: Path, folder: Path) -> Path:
    """Weights that fit a recorded image classifier."""
    config, seen = read_record(run / "config.json"), read_record(run / "preprocessing.json")
    options = options_of(run, config, ModelOptions, weights=None)
    model = build_model(options, seen["channels"], len(seen["classes"]), seen["crop"])
    torch.save(model.state_dict(), folder / "other.pt")
    return folder / "other.pt"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in CLASSIFIERS],
)
def test_a_classifier_of_a_gpu_predicts_and_is_evaluated_on_a_cpu(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    run = H200 / name
    photos = flowers(tmp_path / "photos", 2, ("class0", "class1"))
    grey = read_record(run / "preprocessing.json")["channels"] == 1
    for path in photos.rglob("*.jpg") if grey else ():
        Image.open(path).convert("L").save(path)
    weights = ["--weights", str(weights_for(run, tmp_path))]
    own = read_record(run / "config.json")["data_path"] is None
    data = ["--output", str(tmp_path / "out"), *([] if own else ["--data-path", str(photos)])]
    samples = str(summary(run)["val_total"] if own else 4)
    for tool, words, holds in ((predict, [str(photos)], "class"), (evaluate, data, samples)):
        ((status, _, said),) = pool.run(call_tool, 1, tool.__name__, [str(run), *words])
        assert (status, f"{run}/model.pt is missing: restore it" in said) == (2, True), said
        words = [str(run), *words, *weights]
        ((status, printed, said),) = pool.run(call_tool, 1, tool.__name__, words)
        assert (status, holds in printed) == (0, True), said


def test_a_run_of_another_kind_is_not_called_damaged(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = [run for run in sorted(H200.iterdir()) if run.is_dir() and run.name not in CLASSIFIERS]
    assert len(rest) == 7
    for run, tool in itertools.product(rest, (predict, evaluate)):
        words = [str(run), *(["x.png"] if tool is predict else [])]
        if known := tool is evaluate and run.name.startswith("fsdp"):
            ((status, _, said),) = pool.run(call_tool, 1, tool.__name__, words)
        else:
            status, said = tool.main(words), capsys.readouterr().err
        assert status == 2
        # pydoc's text is that of the Python.
        other = "are not those that|is missing" if known else "is a run of|is not the folder of a t"
        assert re.search(other, said), said
        assert "damaged" not in said


def test_a_run_of_a_gpu_is_listed_compared_and_made_again_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`reproduce` up to the training; it starts no process by a fork, which cannot use CUDA."""
    assert runs.main([str(H200)]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"{run} +2026-11-27 ", listed) for run in FOLDERS)
    assert listed.count("  finished  ") == len(FOLDERS) == 13
    begin = mock.Mock(return_value=SimpleNamespace(returncode=1))
    monkeypatch.setattr(reproduce, "subprocess", SimpleNamespace(run=begin))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork, though CUDA may have begun"))
    foreseen = reproduce.forecast
    for run in FOLDERS:
        assert reproduce.main([str(run), "--output-dir", str(tmp_path / run.name)]) == 1
        assert "other bits than the record's (" in capsys.readouterr().out or run.name == "cpu"
        name, *words = begin.call_args[0][0][4:]
        parse(name, import_module(f"recipes.{name}.train").Config, words)
        monkeypatch.setattr(reproduce, "forecast", lambda one: "other bits than the record's (")
    monkeypatch.setattr(reproduce, "forecast", foreseen)
    assert reproduce.main([str(run), "--against", str(run), "--output-dir", str(tmp_path)]) == 0


def test_a_run_of_a_gpu_goes_on_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    words = ["--nproc", "1", "--output-dir", str(tmp_path), "--max-steps"]
    assert pool.run(call_main, 1, "ddp_launch", [*words, "2"])[0][0] == 0
    config = json.loads((tmp_path / "config.json").read_text())
    gpu = json.loads((H200 / "ddp_spawn" / "config.json").read_text())
    config |= {key: gpu[key] for key in ("device", "backend", "devices_used")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", [*words, "4"])
    assert (status, summary(tmp_path)["resumed_from"]) == (0, 2), said
    assert_options_accept(tmp_path)
    (snapshot,) = (tmp_path / "snapshots").glob("step_00000002*")
    assert read_record(tmp_path / "config.json")["resume"] == str(snapshot)


GONE: Any = object()
DAMAGED: dict[str, dict[str, list[Any]]] = {
    "config.json": {
        "seed": [GONE, None, "x", [0.0], -1, 10**400, 7],
        "precision": [GONE, "fp8", True],
        "recipe": [GONE, None, [1]],
        "cpu_threads": [2**63],
    },
    "preprocessing.json": {"mean": [[0.2]], "crop": [GONE], "classes": [None, ["a"]]},
    "summary.json": {
        "weights_sha256": [GONE, 1],
        "val_top5": ["x", [1], None, float("nan"), 10**400],
        "best": ["x", {}, [1], None],
        "preprocessing_sha256": [GONE],
        "steps": ["x"],
    },
    "manifest.json": {
        "command": [GONE, 1, "python 'x"],
        "data_fingerprint": [GONE, []],
        **{name: [GONE] for name in ("seed", "world_size", "determinism", "gpus", "fingerprint")},
    },
    "metrics.jsonl": {"step": [GONE, "x"], "loss": [[1], 10**400]},
}
"""Files of a run, each with keys and values that damage it."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_a_run_ends_in_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path, "ddp_launch", Config(), build_model(ModelOptions(), 1, 10, 8))

    def read_all() -> None:
        found = trained.read(run)
        found.model(None, torch.device("cpu"))
        found.options(RunOptions)
        reproduce.command_again(reproduce.read(run), "ranks", None, Path("new"))

    read_all()
    intact = (run / name).read_text()
    damages = [(key, value) for key, values in DAMAGED[name].items() for value in values]
    damages += [("", text) for text in ("{", "[" * 100_000, "\xff")]
    damages += [("", "[]")] if name.endswith(".json") else []
    for key, value in damages:
        content = {**json.loads(intact), key: value}
        if value is GONE:
            del content[key]
        damaged = json.dumps(content) if key else value
        (run / name).write_bytes(damaged.encode("latin-1"))
        with pytest.raises(InputError, match=rf"\A.*{run}.*{name}.*\Z"):
            read_all()
