"""What is read back of a run: each damaged entry is named, and none changes a result in silence."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.datasets import DataOptions
from common.errors import InputError
from common.manifest import continued
from common.run.options import RunOptions
from common.training.models import ModelOptions, build_model
from common.weights import weights_sha256
from recipes.ddp_launch.train import Config
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.text import VOCABULARY
from recipes.fsdp.train import Config as TextConfig
from tests.helpers.run_folders import a_run
from tools import reproduce, sample, trained

GONE = object()
WRONG = [GONE, None, "x", [0.0], -1, float("nan"), 10**400, [2**63]]
"""Instead of each entry. Some are right for some entries."""

ALL = ["config.json", "summary.json", "manifest.json"]
CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path, "ddp_launch", Config(), build_model(ModelOptions(), 1, 10, 8))


@pytest.fixture
def text_run(tmp_path: Path) -> Path:
    model = Transformer(TransformerOptions(), VOCABULARY)
    return a_run(tmp_path, "fsdp", TextConfig(), model)


def altered(folder: Path, names: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Each file name and key, while the file holds a wrong value for that key."""
    for name in names:
        intact = (folder / name).read_text()
        for key, value in itertools.product(json.loads(intact), WRONG):
            content = {**json.loads(intact), key: value}
            if value is GONE:
                del content[key]
            (folder / name).write_text(json.dumps(content))
            yield name, key, value
        (folder / name).write_text(intact)


def read_image_run(folder: Path) -> Any:
    """All that predict and evaluate read of a run's folder."""
    run = trained.read(folder)
    model, dtype = run.model(None, CPU)
    decide = ("seed", "precision", "deterministic", "tf32", "cpu_threads")
    options = run.options(RunOptions, cpu_threads=1), run.options(DataOptions)
    seen = {key: run.preprocessing[key] for key in ("resize", "crop", "mean", "std")}
    numbers = [getattr(options[0], name) for name in decide]
    return weights_sha256(model.state_dict()), dtype, seen, run.classes, numbers, options[1].data


def read_text_run(folder: Path) -> Any:
    """All that sample reads of a run's folder."""
    model, context = sample.load(folder)
    return weights_sha256(model.state_dict()), context


def read_again(folder: Path) -> Any:
    """All that reproduce reads of a run's folder."""
    one = reproduce.read(folder)
    reproduce.environment(one.manifest)
    words = reproduce.command_again(one, "ranks", None, Path("new"))
    return words, one.losses, one.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("kind", "read", "names"),
    [
        ("run", read_image_run, ["preprocessing.json", *ALL]),
        ("text_run", read_text_run, ["config.json", "summary.json"]),
        ("run", read_again, ["summary.json", "manifest.json"]),
    ],
)
def test_an_entry_that_is_gone_or_wrong_is_named(
    request: pytest.FixtureRequest, kind: str, read: Callable[[Path], Any], names: list[str]
) -> None:
    """With an entry that is gone, the command ends, or has the result of the intact run."""
    folder: Path = request.getfixturevalue(kind)
    intact, refused = read(folder), 0
    for name, key, value in altered(folder, names):
        try:
            found = read(folder)
        except InputError as error:
            refused, said = refused + 1, str(error)
            # Another recipe or command is not damaged. A range is named as on the command line.
            other = key in ("recipe", "command") and re.search(
                "is a run of x|cannot be repeated", said
            )
            option = f"--{key.replace('_', '-')}"
            keys = (f'"{key}"', option, f"has {key} ", f"{key} in {name}", f"{key} in")
            named = name in said and any(word in said for word in keys)
            assert named or other, (name, key, value, said)
        else:
            assert value is not GONE or found == intact, (name, key)
    assert refused > 40


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("config.json", "image_size", 900, 'config.json: "image_size" is 900, but "crop" is 8 in'),
        ("config.json", "seed", 7, 'config.json: "seed" is 7, but 0 in manifest.json'),
        ("preprocessing.json", "classes", None, '"classes" differ from .*class_indices.json'),
    ],
)
def test_two_files_that_contradict_each_other_are_named(
    run: Path, name: str, key: str, value: Any, says: str
) -> None:
    intact = (run / name).read_text()
    content = json.loads(intact)
    content[key] = value if value is not None else content[key][::-1]
    (run / name).write_text(json.dumps(content))
    try:
        with pytest.raises(InputError, match=says):
            trained.read(run)
    finally:
        (run / name).write_text(intact)


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("summary.json", "val_loss", 10**400, "must be a number, but is 1000"),
        ("preprocessing.json", "mean", [2**63], "must be one number from -1,000 to 1,000 per"),
        ("preprocessing.json", "mean", [10**400], "must be one number from -1,000 to 1,000 per"),
        ("preprocessing.json", "std", [1e-320], "must be one number from 0.000001 to 1,000 per"),
        ("preprocessing.json", "std", [1e300], "must be one number from 0.000001 to 1,000 per"),
        ("preprocessing.json", "crop", 1_000_000, "must be a whole number from 1 to 10,000, but"),
        (
            "preprocessing.json",
            "resize",
            [8, 100_000],
            "must be one or two whole numbers from 1 to",
        ),
        ("preprocessing.json", "resize", [2**63, 8], "must be one or two whole numbers from 1 to"),
        ("config.json", "image_size", 1_000_000, "must be a whole number from 1 to 10,000 or null"),
        ("config.json", "cpu_threads", 2**63, "must be a whole number, but is 9223372"),
    ],
)
def test_a_number_that_is_too_large_or_too_small_is_named(
    run: Path, name: str, key: str, value: Any, says: str
) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**content, key: value}))
    with pytest.raises(InputError, match=f'{name}: "{key}" {says}'):
        trained.read(run).options(RunOptions)


@pytest.mark.parametrize("value", ["x", [1], True, None])
def test_every_metric_of_the_summary_is_a_number(run: Path, value: Any) -> None:
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**content, "val_top5": value}))
    readers: list[Callable[[Path], Any]] = [trained.read, reproduce.read]
    for read in readers:
        with pytest.raises(InputError, match=r'summary\.json: "val_top5" must be a number, but is'):
            read(run)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, "\xff"])
def test_a_damaged_file_is_named(run: Path, content: str) -> None:
    for name in ("preprocessing.json", *ALL):
        intact = (run / name).read_bytes()
        (run / name).write_bytes(content.encode("latin-1"))
        readers: list[Callable[[Path], Any]] = [trained.read, reproduce.read]
        for read in readers[: 1 if name == "preprocessing.json" else 2]:
            with pytest.raises(InputError, match=rf"{name} is damaged .*: restore it, or train"):
                read(run)
        (run / name).write_bytes(intact)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"epoch": 0}', r'metrics\.jsonl line 1: "step" must be .*, but is missing'),
        ('{"step": 1, "loss": "x"}', r'metrics\.jsonl line 1: "loss" must be a number, but is "x"'),
        ("[]", r"metrics\.jsonl line 1 is damaged"),
        ("{", r"metrics\.jsonl is damaged"),
    ],
)
def test_a_damaged_line_of_the_metrics_is_named(run: Path, line: str, says: str) -> None:
    (run / "metrics.jsonl").write_text(line)
    with pytest.raises(InputError, match=says):
        reproduce.read(run)


def test_a_command_with_an_open_quote_is_named(run: Path) -> None:
    content = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**content, "command": "python 'x"}))
    with pytest.raises(InputError, match=r'manifest\.json: "command" is no command \(No closing'):
        read_again(run)


def test_data_whose_bytes_an_older_start_did_not_record_are_not_called_others() -> None:
    older = "0" * 64
    now = {"cpu": "B", "data_fingerprint": f"{older}, contents {older}"}
    assert continued(now, {"cpu": "B", "data_fingerprint": older}, 7) == now


def test_an_earlier_start_that_is_no_list_does_not_stop_a_resumed_run() -> None:
    found = continued({"cpu": "B"}, {"cpu": "A", "before": "x"}, 7)
    assert found == {"cpu": "B", "before": [{"until_step": 7, "cpu": "A"}]}
