"""An exported file answers as the trained model does, without this repository."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.data.datasets import DataOptions, digits_data
from common.launch.ranks import Ranks
from common.weights import weights_sha256
from recipes.ddp_launch import train as ddp_launch
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import need
from tests.helpers.pool import Pool, call_main, call_tool
from tools import export
from tools.trained import read

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet, whose BatchNorm has statistics, on digits."""
    folder = tmp_path_factory.mktemp("export") / "run"
    words = "--nproc 1 --model resnet18 --epochs 1 --max-steps 5 --lr 0.001 --cpu-threads 1"
    given = [*words.split(), "--output-dir", str(folder)]
    (answer,) = pool.run(call_main, 1, "ddp_launch", given)
    assert answer[0] == 0, answer
    return folder


def exported(pool: Pool, *words: str | Path) -> tuple[int, str, str]:
    (answer,) = pool.run(call_tool, 1, "tools.export", list(map(str, words)))
    return answer  # type: ignore[no-any-return]


def digits(run: Path) -> tuple[Tensor, Tensor]:
    """All held-out images, and the trained model's logits."""
    val = digits_data(DataOptions(), 0).val
    images, _ = val.__getitems__([(0, place) for place in range(len(val))])
    model, _ = read(run).model(None, CPU)
    with torch.no_grad():
        return images, model(images)


ALONE = """
import sys, torch
model = torch.export.load("model.pt2").module()
answers = [model(images) for images in torch.load("images.pt")]
torch.save(answers, "answers.pt")
assert not {"common", "recipes", "tools", "torchvision"} & sys.modules.keys()
"""


def test_make_exports_a_model_that_answers_the_same_where_this_repository_is_not(
    recipe: Recipe, run: Path, tmp_path: Path
) -> None:
    need("make")
    words = ("-C", ROOT, f"PYTHON={sys.executable}", f"RUN={run}", f"TO={tmp_path / 'model.pt2'}")
    done = recipe.finish(recipe.start("make", "export", *words), tmp_path).assert_ok()
    assert "model.pt2: 100 held-out samples: answers differ by" in done.stdout
    images, expected = digits(run)
    torch.save([images, images[:1], images[:3]], tmp_path / "images.pt")
    command = [sys.executable, "-I", "-c", ALONE]  # -I: no PYTHONPATH, no current folder
    subprocess.run(command, cwd=tmp_path, check=True, env={"CUDA_VISIBLE_DEVICES": ""})
    for answer, count in zip(torch.load(tmp_path / "answers.pt"), (360, 1, 3), strict=True):
        assert torch.allclose(answer.softmax(1), expected[:count].softmax(1), rtol=0, atol=1e-5)
        assert torch.equal(answer.argmax(1), expected[:count].argmax(1))
    beside = json.loads((tmp_path / "model.pt2.preprocessing.json").read_text())
    assert beside == json.loads((run / "preprocessing.json").read_text())
    assert not list(tmp_path.glob("*.export*")), "nothing else is left"
    asked, _ = torch.export.load(tmp_path / "model.pt2").example_inputs
    assert not asked[0].any(), "no held-out image is given away"


def test_safetensors_are_the_weights_of_the_run(pool: Pool, run: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "model.safetensors"
    status, printed, said = exported(pool, run, file)
    assert (status, "100 held-out samples" in printed) == (0, True), said
    own = torch.load(run / "model.pt")
    found = safetensors.load_file(file)
    assert found.keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in found.items())
    given = [str(run), "--json", "--weights", str(file), "--output", str(tmp_path / "out")]
    status, printed, said = pool.run(call_tool, 1, "tools.evaluate", given)[0]
    summary = json.loads((run / "summary.json").read_text())
    assert (status, json.loads(printed)["val_loss"]) == (0, summary["val_loss"]), said


def test_onnx_answers_in_its_own_runtime(pool: Pool, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "model.onnx"
    status, printed, said = exported(pool, run, file)
    assert (status, "100 held-out samples" in printed) == (0, True), said
    images, expected = digits(run)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (360, 1):
        (answer,) = session.run(None, {"input": images[:count].numpy()})
        chances = torch.from_numpy(answer).softmax(1)
        assert torch.allclose(chances, expected[:count].softmax(1), rtol=0, atol=1e-5)


def with_other_answers(ranks: Ranks, change: float, arguments: list[str]) -> tuple[int, str, str]:
    """`export` to a file whose first logit of sample 7 is another one than the model's."""

    def write(model: nn.Module, _inputs: Tensor, path: Path) -> Any:
        path.write_text("a model")

        def loaded(inputs: Tensor) -> Tensor:
            logits: Tensor = model(inputs).clone()
            logits[7, 0] += change
            return logits

        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(export.FORMATS, ".pt2", (write, []))
        return call_tool(ranks, "tools.export", arguments)


@pytest.mark.parametrize(("change", "status"), [(1e-6, 0), (1e-2, 1), (float("nan"), 1)])
def test_a_file_that_answers_otherwise_is_not_kept_and_the_sample_is_named(
    pool: Pool, run: Path, tmp_path: Path, change: float, status: int
) -> None:
    file = tmp_path / "model.pt2"
    given = [str(run), str(file)]
    ((found, printed, said),) = pool.run(with_other_answers, 1, change, given)
    assert found == status, said
    assert file.exists() == (status == 0)
    if status:
        sample = digits_data(DataOptions(), 0).val.indices[7]
        assert f"the trained one on 1 of 100 held-out samples: {sample} (by " in said
        assert not list(tmp_path.iterdir())
        assert not printed


def without_packages(ranks: Ranks, arguments: list[str]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "find_spec", lambda _: None)
        return call_tool(ranks, "tools.export", arguments)


def test_what_cannot_be_exported_is_one_line(pool: Pool, run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.pt2").write_text("mine")
    for to, says in (
        ("model.pth", "model.pth ends in none of .safetensors, .pt2, .onnx"),
        ("there.pt2", "there.pt2 exists: remove it"),
        ("none/model.pt2", "none is no folder: make it first"),
        ("a.onnx", "a.onnx needs onnx and onnxscript: pip install onnx onnxscript\n"),
        ("a.safetensors", "needs safetensors: pip install safetensors\n"),
    ):
        given = [str(run), str(tmp_path / to)]
        ((status, printed, said),) = pool.run(without_packages, 1, given)
        assert (status, printed) == (2, ""), said
        assert says in said
    assert (tmp_path / "there.pt2").read_text() == "mine"


class Halves(nn.Module):
    """A model of one's own, which is traced for any number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = sum(self.layer(half.flatten(1)) for half in images.chunk(2, dim=2))
        return logits


def own_model(ranks: Ranks, run: Path, to: Path) -> tuple[int, str, str]:
    own = SimpleNamespace(
        Config=ddp_launch.Config, own_model=lambda _: Halves(), __name__="recipes.own.train"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "recipe_of", lambda _: own)
        return call_tool(ranks, "tools.export", [str(run), str(to)])


def test_a_model_of_ones_own_is_exported_too(pool: Pool, run: Path, tmp_path: Path) -> None:
    copy, weights = tmp_path / "run", Halves().state_dict()
    copy.mkdir()
    for name in ("config.json", "manifest.json"):
        (copy / name).write_bytes((run / name).read_bytes())
    summary = json.loads((run / "summary.json").read_text())
    summary["weights_sha256"] = weights_sha256(weights)
    del summary["best"]
    (copy / "summary.json").write_text(json.dumps(summary))
    torch.save(weights, copy / "model.pt")
    ((status, printed, said),) = pool.run(own_model, 1, copy, tmp_path / "own.pt2")
    assert (status, "100 held-out samples" in printed) == (0, True), said
    model, images = Halves(), digits(run)[0]
    model.load_state_dict(weights)
    with torch.no_grad():
        answer = torch.export.load(tmp_path / "own.pt2").module()(images)
        assert torch.allclose(answer, model(images), atol=1e-6)
