"""`predict` and `evaluate`: what a trained model says is what the training's evaluation said."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

from common.cli import parse
from common.errors import InputError, TrainingError
from common.launch.ranks import Ranks
from common.training.models import ModelOptions, build_model, how_to_build
from recipes import __main__ as front
from tests.helpers.commands import ROOT, Recipe, clean_env
from tests.helpers.images import flowers, idx, photo
from tests.helpers.machine import need
from tests.helpers.pool import Pool, call_tool
from tools import evaluate, predict
from tools.trained import load_all

TINY = "--num-workers 0 --epochs 1 --max-steps 2 --global-batch-size 8 --lr 0.001 --cpu-threads 1"
MODELS = {
    "ddp_launch": "--model resnet18 --zero-init-residual",
    "ddp_spawn": "--model resnet18 --zero-init-residual",
    "dp_resnet50": "--model resnet18",
    "model_parallel_toy": "--model resnet50 --norm group",
}
"""The recipes whose runs can predict, each with a small ResNet where it has one."""

STEMS = {("small", 3): 32, ("large", 3): 64, ("small", 1): 28, ("large", 1): 64}
"""First layers of the ResNet and channels, to the side of the images [px]."""

BY_DEFAULT = {"ddp_launch": ("small", 3)}
CASES = [
    pytest.param(name, *case, marks=() if BY_DEFAULT.get(name) == case else pytest.mark.slow)
    for name in MODELS
    for case in STEMS
]


def fashion(root: Path) -> tuple[Path, list[Path]]:
    """FashionMNIST's files with 20 images of noise, and the validation images as PNG files."""
    raw = root / "store" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng, pngs = np.random.default_rng(0), []
    for part in ("train", "t10k"):
        images = rng.integers(0, 255, (20, 28, 28)).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx((np.arange(20) % 10).astype(np.uint8)))
    for number, pixels in enumerate(images):
        pngs.append(root / "pngs" / f"{number:02}.png")
        pngs[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(pngs[-1])
    return root / "store", pngs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, list[Path]]]:
    """Channels to the options of a data set, and its held-out files (of photos: in the run)."""
    root = tmp_path_factory.mktemp("data")
    store, pngs = fashion(root)
    photos = flowers(root / "photos", names=("daisy", "rose", "tulip"))
    return {
        1: (f"--data fashion_mnist --data-path {store}", pngs),
        3: (f"--data imagefolder --data-path {photos}", []),
    }


def train(ranks: Ranks, name: str, arguments: list[str]) -> list[list[float]]:
    """Train as the recipe's command does; the probabilities in its last evaluation, by sample."""
    recipe = import_module(f"recipes.{name}.train")
    seen: list[Tensor] = []
    own_evaluate = recipe.evaluate

    def watched(model: Any, *rest: Any) -> Any:
        seen.clear()
        hook = model.register_forward_hook(lambda _m, _i, logits: seen.append(logits.double()))
        result = own_evaluate(model, *rest)
        hook.remove()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "evaluate", watched)
        _, config = parse(name, recipe.Config, arguments)
        recipe.train(config, ranks)
    probabilities: list[list[float]] = torch.cat(seen).softmax(1).tolist()
    return probabilities


def predicted(pool: Pool, run: Path, *words: str | Path) -> tuple[int, str, str]:
    arguments = [str(run), *map(str, words)]
    ((status, printed, said),) = pool.run(call_tool, 1, "tools.predict", arguments)
    return status, printed, said


def evaluated(pool: Pool, world_size: int, run: Path, *words: str | Path) -> tuple[int, str, str]:
    options = ["--json", "--num-workers", "0", *map(str, words)]
    answers = pool.run(call_tool, world_size, "tools.evaluate", [str(run), *options])
    assert all(not printed for _, printed, _ in answers[1:])
    status, printed, said = answers[0]
    return int(status), str(printed), str(said)


def by_snippet(run: Path, files: list[Path]) -> list[list[float]]:
    """What the lines in docs/use.md print for each file."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.DOTALL)
    found = []
    for file in files:
        shown: list[Tensor] = []
        with torch.no_grad():
            lines = text.replace("RUN/", f"{run}/").replace("photo.jpg", str(file))
            exec(lines, {"print": shown.append})
        found += shown[0].double().tolist()
    return found


@pytest.mark.parametrize(
    ("name", "norm", "side", "channels"),
    [
        ("resnet18", "batch", 64, 3),
        ("resnet34", "batch", 64, 1),
        ("resnet50", "group", 32, 3),
        ("resnet34", "group", 28, 1),
    ],
)
def test_the_lines_on_the_page_build_every_resnet(
    tmp_path: Path, name: Any, norm: Any, side: int, channels: int
) -> None:
    torch.manual_seed(0)
    options = ModelOptions(model=name, norm=norm)
    model, file = build_model(options, channels, 3, side).eval(), tmp_path / "photo.jpg"
    torch.save(model.state_dict(), tmp_path / "model.pt")
    photo(file, 1)
    seen = {
        "channels": channels,
        "resize": [side],
        "crop": side,
        "mean": [0.4] * channels,
        "std": [0.2] * channels,
        "classes": ["a", "b", "c"],
        "model": how_to_build({**vars(options), **options.resolved(side)}, side),
    }
    (tmp_path / "preprocessing.json").write_text(json.dumps(seen))
    colours = Image.open(file).convert("RGB" if channels == 3 else "L")
    image = center_crop(resize(pil_to_tensor(colours), [side]), [side]).float() / 255
    with torch.no_grad():
        expected = model((image[None] - 0.4) / 0.2).softmax(1).double()
    shown = torch.tensor(by_snippet(tmp_path, [file])).double()
    assert torch.allclose(shown, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "stem", "channels"), CASES)
def test_predictions_are_those_of_the_trainings_own_evaluation(
    pool: Pool,
    data: dict[int, tuple[str, list[Path]]],
    tmp_path: Path,
    name: str,
    stem: str,
    channels: int,
) -> None:
    options, files = data[channels]
    run, side = tmp_path / "run", STEMS[stem, channels]
    words = f"{options} {MODELS[name]} {TINY} --image-size {side} --output-dir {run}".split()
    (own,) = pool.run(train, 1, name, words)
    config = json.loads((run / "config.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    if channels == 3:
        held_out = json.loads((run / "held_out.json").read_text())
        files = [Path(config["data_path"]) / file for file in held_out]
    assert "auto" not in config.values()
    config.setdefault("stem", stem)  # model_parallel_toy has no such option
    assert (config["stem"], config["image_size"]) == (stem, side)
    status, printed, said = predicted(pool, run, *files, "--json", "--top-k", "100")
    assert status == 0, said
    classes = json.loads((run / "preprocessing.json").read_text())["classes"]
    answers = [json.loads(line) for line in printed.splitlines()]
    assert [answer["file"] for answer in answers] == [str(file) for file in files]
    theirs = torch.tensor(
        [[{t["class"]: t["probability"] for t in a["top"]}[c] for c in classes] for a in answers]
    )
    expected = torch.tensor(own)
    assert expected.std(0).max() > 1e-4, "a test with equal images would prove little"
    assert torch.allclose(theirs, expected, rtol=0, atol=1e-6)
    best = [classes[place] for place in expected.argmax(1).tolist()]
    assert [answer["class"] for answer in answers] == best
    snippet = torch.tensor(by_snippet(run, files))
    assert torch.allclose(snippet, expected, rtol=0, atol=1e-6)
    for world_size in (1, 2, 3) if name == "ddp_launch" else (3,):
        status, printed, said = evaluated(pool, world_size, run)
        assert status == 0, said
        result = json.loads(printed)
        assert result["held_out"]
        for key in ("val_loss", "val_accuracy", "val_correct", "val_total", "weights_sha256"):
            assert result[key] == summary[key], (key, world_size)


@pytest.fixture(scope="module")
def photo_run(
    pool: Pool, data: dict[int, tuple[str, list[Path]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of the small network on the photos."""
    run = tmp_path_factory.mktemp("photo_run") / "run"
    words = f"{data[3][0]} {TINY} --image-size 16 --output-dir {run}"
    pool.run(train, 1, "ddp_launch", words.split())
    return run


@pytest.fixture(scope="module")
def digits_run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images of one channel."""
    run = tmp_path_factory.mktemp("digits_run") / "run"
    pool.run(train, 1, "ddp_launch", f"{TINY} --output-dir {run}".split())
    return run


def refusal(answer: tuple[int, str, str]) -> str:
    """The one line of a command that did nothing."""
    status, printed, said = answer
    assert status == 2, said
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert "Traceback" not in said
    assert not printed
    return errors[0]


def test_a_truncated_photo_is_named_and_the_others_are_predicted(
    recipe: Recipe, photo_run: Path
) -> None:
    folder = recipe.tmp_path / "photos"
    for number in range(40):
        photo(folder / f"part {number % 2}" / f"{number}.jpg", number)
    torn = folder / "part 1" / "7.jpg"
    torn.write_bytes(torn.read_bytes()[:300])
    (folder / "notes.txt").write_text("no image")
    Image.new("RGB", (9, 9)).save(folder / "part 1" / "7.gif")
    (folder / ".DS_Store").write_text("hidden")
    result = recipe.module("predict", photo_run, folder, "--json")
    assert "left out, not images by their names: 2 (.txt 1, .gif 1)\n" in result.stderr
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    assert f"1 of 40 images were not predicted; the first is {torn} cannot" in result.errors[0]
    assert "Traceback" not in result.stderr
    assert "40/40" in result.stderr, "a progress bar"
    *_, counts = result.stderr.rpartition("images per class:\n")
    counted = {name: int(count) for count, name in re.findall(r"(?m)^ +(\d+)  (\w+)$", counts)}
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    expected = sorted(path for path in folder.rglob("*.jpg") if path != torn)
    assert [answer["file"] for answer in answers] == [str(path) for path in expected]
    assert all(len(a["top"]) == 3 and a["probability"] <= 1 for a in answers)
    assert counted == Counter(answer["class"] for answer in answers)


def test_a_photo_that_pillow_will_not_open_is_named_and_the_others_are_predicted(
    pool: Pool, photo_run: Path, tmp_path: Path
) -> None:
    good, texts = tmp_path / "good.png", PngInfo()
    photo(good, 1)
    texts.add_text("comment", "a" * 3_000_000, zip=True)  # ValueError, not OSError
    Image.new("RGB", (8, 8)).save(tmp_path / "texts.png", pnginfo=texts)
    status, printed, said = predicted(pool, photo_run, tmp_path / "texts.png", good, "--json")
    assert (status, json.loads(printed)["file"]) == (1, str(good)), said
    assert "texts.png cannot be decoded (Decompressed data too large" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_make_predicts_and_evaluates(recipe: Recipe, digits_run: Path) -> None:
    need("make")
    image = recipe.tmp_path / "seven.png"
    Image.fromarray(np.zeros((20, 20), np.uint8)).save(image)
    make = ["make", "--no-print-directory", "-C", str(ROOT), f"PYTHON={sys.executable}"]
    words = ["predict", f"RUN={digits_run}", f"INPUT={image}", "ARGS=--top-k 2"]
    done = recipe.finish(recipe.start(*make, *words), recipe.tmp_path)
    assert done.status == 0, done.stderr
    head, line = done.stdout.splitlines()
    assert re.fullmatch(r"file +class  probability  then", head)
    assert re.fullmatch(rf"{image}  \d +0\.\d{{4}}  \d 0\.\d{{4}}", line)
    words = ["evaluate", f"RUN={digits_run}", "NPROC=2"]
    done = recipe.finish(recipe.start(*make, *words), recipe.tmp_path)
    assert done.status == 0, done.stderr
    assert "world_size 2, device cpu" in done.stdout
    assert "\nthe same as in summary.json, to the bit\n" in done.stdout
    assert "%|" not in done.stdout


def test_bad_input_to_predict(
    pool: Pool,
    photo_run: Path,
    digits_run: Path,
    data: dict[int, tuple[str, list[Path]]],
    tmp_path: Path,
) -> None:
    file = tmp_path / "one.jpg"
    photo(file, 1)
    (tmp_path / "empty").mkdir()
    notes = tmp_path / "notes.jpg"
    notes.write_text("no image")
    moving = tmp_path / "moving.gif"
    Image.new("RGB", (9, 9)).save(moving)
    for run, words, says in (
        (tmp_path / "none", [file], "none is not the folder of a run"),
        (photo_run, [tmp_path / "gone"], "gone does not exist"),
        (photo_run, [tmp_path / "empty"], r"empty has no images \(\.bmp, "),
        (photo_run, [file, notes], r"notes\.jpg is not an image"),
        (photo_run, [moving], r"moving\.gif is not an image by its name: training takes .*\.bmp, "),
        (photo_run, [file, "--top-k", "0"], "--top-k must be at least 1"),
        (photo_run, [file, "--weights", notes], "is not a weights file"),
        (
            photo_run,
            [file, "--weights", digits_run / "model.pt"],
            r"does not fit convnet .* 3 entries",
        ),
        (photo_run, [], "required: input"),
        (digits_run, [file], r"one\.jpg is not a grey image \(Pillow's mode RGB\), but the model"),
        (digits_run, [tmp_path], r"one\.jpg is not a grey image"),
    ):
        assert re.search(says, refusal(predicted(pool, run, *words))), says
    changed = shutil.copytree(photo_run, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    for model in ("toy", None):  # model_parallel_toy's points; dp_scratch and checkpoint_rnn
        (changed / "config.json").write_text(json.dumps({**config, "model": model}))
        said = refusal(predicted(pool, changed, file))
        assert f"with model {model}, and not of an image classifier that can be rebuilt" in said
    (changed / "config.json").write_text(json.dumps(config))
    (changed / "preprocessing.json").write_text("{")
    assert "preprocessing.json is damaged" in refusal(predicted(pool, changed, file))
    (changed / "preprocessing.json").unlink()
    assert "preprocessing.json is missing" in refusal(predicted(pool, changed, file))
    (changed / "summary.json").unlink()
    assert "has not finished" in refusal(predicted(pool, changed, file))


def test_a_pipe_is_refused_and_not_opened(tmp_path: Path) -> None:
    pipe, image, link = tmp_path / "pipe.png", tmp_path / "one.png", tmp_path / "link.png"
    os.mkfifo(pipe)
    Image.new("L", (8, 8)).save(image)
    link.symlink_to(image)
    with pytest.raises(InputError, match=r"pipe\.png is no file, but a pipe"):
        predict.listed([link, pipe], 1)
    assert predict.listed([link], 1) == ([link], [])


def test_a_model_trained_from_other_weights_needs_their_file_no_more(
    pool: Pool, photo_run: Path, data: dict[int, tuple[str, list[Path]]], tmp_path: Path
) -> None:
    run, first, file = tmp_path / "run", tmp_path / "first.pt", tmp_path / "one.jpg"
    shutil.copy(photo_run / "model.pt", first)
    photo(file, 1)
    words = f"{data[3][0]} {TINY} --image-size 16 --weights {first} --output-dir {run}"
    pool.run(train, 1, "ddp_launch", words.split())
    first.unlink()
    status, printed, said = predicted(pool, run, file, "--json")
    assert status == 0, said
    assert json.loads(printed)["class"] in ("daisy", "rose", "tulip")


def test_a_run_in_fp64_is_evaluated_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(train, 1, "ddp_launch", f"{TINY} --precision fp64 --output-dir {run}".split())
    summary = json.loads((run / "summary.json").read_text())
    found = json.loads(evaluated(pool, 2, run)[1].splitlines()[-1])
    assert [found[key] for key in found if key in summary] == [
        summary[key] for key in found if key in summary
    ]


def test_an_altered_model_is_named(
    recipe: Recipe, pool: Pool, photo_run: Path, tmp_path: Path
) -> None:
    run, file = shutil.copytree(photo_run, tmp_path / "altered"), tmp_path / "one.jpg"
    photo(file, 1)
    for name in ("model.pt", "best.pt"):
        weights = torch.load(run / name)
        next(iter(weights.values())).flatten()[0] += 1e-3
        torch.save(weights, run / name)
        says = f"{run / name} is not what the run wrote (weights_sha256 in summary.json)"
        choice: list[str | Path] = [] if name == "model.pt" else ["--weights", run / name]
        assert says in refusal(predicted(pool, run, file, *choice))
        assert says in refusal(evaluated(pool, 2, run, *choice))
        moved = (run / name).rename(tmp_path / name)
        assert f"{run / name} is missing" in refusal(predicted(pool, run, file, *choice))
        assert predicted(pool, run, file, "--weights", moved)[0] == 0, "another state_dict"
        shutil.copy(moved, run / name)
    (run / "model.pt").write_bytes((run / "model.pt").read_bytes()[:1000])
    done = recipe.module("evaluate", run, "--nproc", "2")
    assert done.status == 2
    (error,) = done.errors
    assert f"{run}/model.pt is not what the run wrote" in error


def test_an_altered_preprocessing_is_named(pool: Pool, photo_run: Path, tmp_path: Path) -> None:
    run, file = shutil.copytree(photo_run, tmp_path / "altered"), tmp_path / "one.jpg"
    photo(file, 1)
    intact = (run / "preprocessing.json").read_bytes()
    for key in ("mean", "resize", "model"):
        seen = json.loads(intact)
        seen[key] = {**seen[key], "num_classes": 4} if key == "model" else [9] * len(seen[key])
        (run / "preprocessing.json").write_text(json.dumps(seen))
        says = f"{run}/preprocessing.json is not what the run wrote"
        assert says in refusal(predicted(pool, run, file))
        assert says in refusal(evaluated(pool, 2, run))


def test_images_of_the_same_names_and_sizes_are_not_the_runs_own(
    pool: Pool, tmp_path: Path
) -> None:
    root, run = flowers(tmp_path / "data", per_class=6), tmp_path / "run"
    for jpeg in [*root.rglob("*.jpg")]:
        Image.open(jpeg).save(jpeg.with_suffix(".bmp"))
        jpeg.unlink()
    words = f"--data imagefolder --data-path {root} {TINY} --image-size 16 --output-dir {run}"
    pool.run(train, 1, "ddp_launch", words.split())
    assert evaluated(pool, 1, run)[0] == 0
    manifest = json.loads((run / "manifest.json").read_text())
    _, contents = manifest["data_fingerprint"].split(", contents ")
    last = root / "tulip" / "tulip 5.bmp"
    last.write_bytes((root / "daisy" / "daisy 0.bmp").read_bytes())
    status, printed, said = evaluated(pool, 1, run)
    assert (status, "val_loss" in printed) == (2, False)
    assert "is not the data that" in said
    moved = shutil.copytree(root, tmp_path / "moved")
    status, printed, said = evaluated(pool, 1, run, "--data-path", moved)
    assert (status, "val_loss" in printed) == (2, False), "it would be of training images, too"
    with pytest.raises(InputError, match=r"of another run .*contents"):
        pool.run(train, 1, "ddp_launch", f"{words} --max-steps 4".split())
    shutil.copy(root / "tulip" / "tulip 4.bmp", last)
    assert evaluated(pool, 1, run)[0] == 0
    (run / "manifest.json").write_text(json.dumps({**manifest, "data_fingerprint": contents}))
    assert evaluated(pool, 1, run)[0] == 2


def test_names_are_readable_in_the_c_locale(
    recipe: Recipe, photo_run: Path, tmp_path: Path
) -> None:
    run, file = shutil.copytree(photo_run, tmp_path / "run"), tmp_path / "one.jpg"
    photo(file, 1)
    seen = json.loads((run / "preprocessing.json").read_text())
    seen["classes"] = ["rosé", "łąka", "玫瑰"]
    (run / "preprocessing.json").write_text(json.dumps(seen))
    (run / "class_indices.json").write_text(json.dumps(dict(enumerate(seen["classes"]))))
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "recipes", "predict", str(run), str(file)]
    environment = {**clean_env(), **env}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in seen["classes"]), done.stdout


def test_classes_may_be_renamed_but_not_swapped_and_names_stay_in_their_line(
    pool: Pool, photo_run: Path, tmp_path: Path
) -> None:
    run, folder = shutil.copytree(photo_run, tmp_path / "run"), tmp_path / "a\nerror: \x1b[2J"
    photo(folder / "one.jpg", 1)
    seen = json.loads((run / "preprocessing.json").read_text())

    def name(*classes: str) -> None:
        seen["classes"] = classes
        (run / "preprocessing.json").write_text(json.dumps(seen))
        (run / "class_indices.json").write_text(json.dumps(dict(enumerate(classes))))

    for swapped in (("rose", "daisy", "tulip"), ("lily", "daisy", "tulip")):
        name(*swapped)
        for answer in (
            predicted(pool, run, folder),
            evaluated(pool, 1, run, "--data-path", folder),
        ):
            assert '"classes" has ' in refusal(answer)
    name("a\nerror: a", "\x1b[2Jb", "tulip\r")
    status, printed, said = predicted(pool, run, folder)
    assert status == 0, said
    assert len(printed.splitlines()) == 2
    assert not {"\x1b", "\r"} & {*printed}
    assert "\x1b[2J" not in said  # the progress bar has others
    assert r"a\nerror: \x1b[2J/one.jpg" in printed


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_result_that_cannot_be_written_is_no_success(
    recipe: Recipe, photo_run: Path, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "one.jpg"
    photo(file, 1)
    words = [photo_run, file] if command == "predict" else [photo_run, "--nproc", "1"]
    line = shlex.join([sys.executable, "-m", "recipes", command, *map(str, words)])
    for where, status, says in (
        (">&-", 2, "error: stdout is closed, and the result goes there: redirect it to a file"),
        (">/dev/full", 1, "cannot write to stdout (No space left on device): make room"),
    ):
        done = recipe.finish(recipe.start("sh", "-c", f"{line} {where}"), tmp_path)
        assert (done.status, len(done.errors)) == (status, 1), done.stderr
        assert says in done.errors[0]
        assert "Traceback" not in done.stderr


def front_door(
    _ranks: Ranks, where: str, buffering: int, arguments: list[str]
) -> tuple[int, list[str]]:
    """The front door in a warm process, its stdout full or without reader: status, lines said."""
    said = io.StringIO()
    reader, writer = os.pipe()
    os.close(reader)
    if where == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    stdout = os.fdopen(writer, "w", buffering)
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(said),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.argv", ["recipes", *arguments])
        status = front.main()
    with contextlib.suppress(OSError):
        stdout.close()
    return status, [line for line in said.getvalue().splitlines() if "error" in line.lower()]


@pytest.mark.parametrize("buffering", [1, -1], ids=["by line", "at the end"])
def test_every_command_says_that_stdout_is_full_and_ends_quietly_without_reader(
    pool: Pool, digits_run: Path, tmp_path: Path, buffering: int
) -> None:
    file, run = tmp_path / "one.png", str(digits_run)
    Image.new("L", (8, 8)).save(file)
    for words in (
        ["--help"],
        ["ddp_launch", "--help"],
        ["predict", "--help"],
        ["evaluate", "--help"],
        ["predict", run, str(file)],
        ["evaluate", run, "--nproc", "1", "--json"],
        ["reproduce", run, "--against", run, "--output-dir", str(tmp_path / f"{buffering}")],
        ["doctor", "--nproc", "100000"],
    ):
        ((status, errors),) = pool.run(front_door, 1, "full", buffering, words)
        assert (status, len(errors)) == (1, 1), (words, errors)
        full = r"error: (rank 0 on \S+: )?cannot write to stdout \(No space left on device\): make"
        assert re.match(full, errors[0]), words
        shutil.rmtree(tmp_path / f"{buffering}", ignore_errors=True)
        ((status, errors),) = pool.run(front_door, 1, "gone", buffering, words)
        assert (status, errors) == (int("doctor" in words), []), "doctor found an error"


def test_an_answer_that_is_not_finite_is_no_result(
    pool: Pool, photo_run: Path, tmp_path: Path
) -> None:
    file, huge = tmp_path / "one.jpg", tmp_path / "huge.pt"
    photo(file, 1)
    weights = torch.load(photo_run / "model.pt")
    torch.save({name: value * 1e38 for name, value in weights.items()}, huge)
    said = refusal(predicted(pool, photo_run, file, "--json", "--weights", huge))
    assert f"the model's answer to {file} is not finite with {huge}: give other" in said
    status, printed, said = evaluated(pool, 1, photo_run, "--weights", huge)
    assert (status, "val_loss" in printed) == (2, False)
    assert f"error: val_loss is not finite with {huge}: give other weights\n" in said


@pytest.mark.parametrize(
    ("changes", "altered"),
    [
        ({"val_loss": 1.6921395168339257}, False),
        ({"val_accuracy": 213 / 360, "val_correct": 213}, False),
        ({"val_accuracy": 213 / 360}, True),
        ({"val_correct": 99999}, True),
        ({"val_correct": 0}, True),
        ({"val_correct": 213}, True),
        ({"val_total": 370}, True),
        ({"val_loss": 2.0}, True),
        ({"val_accuracy": 1e308}, True),
    ],
)
def test_numbers_of_samples_have_no_last_bits(changes: dict[str, Any], altered: bool) -> None:
    result = {
        "val_loss": 1.6921395168339255,
        "val_accuracy": 214 / 360,
        "val_correct": 214,
        "val_total": 360,
    }
    for exact in (False, True):
        found = evaluate.verdict(result, result, exact=exact)
        assert found == "the same as in summary.json, to the bit"
        if not altered and not exact:
            assert "the last bits" in evaluate.verdict(result, {**result, **changes}, exact=exact)
            continue
        with pytest.raises(TrainingError, match="a file of the run was altered"):
            evaluate.verdict(result, {**result, **changes}, exact=exact)


def test_on_the_runs_own_machine_its_bits_are_asked_for(pool: Pool, tmp_path: Path) -> None:
    """So an altered seed, which splits the data otherwise, is no other machine's last bits."""
    if not (Path(sys.prefix) / "lock.txt").is_file():
        pytest.skip("without a lock file nothing is known of Pillow")
    run = tmp_path / "run"
    words = f"{TINY} --output-dir {run}"
    pool.run(train, 1, "ddp_launch", words.split())
    for name in ("config.json", "manifest.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, "seed": 1}))
    status, printed, said = evaluated(pool, 1, run)
    assert (status, "val_loss" in printed) == (1, False)
    assert "the machine and all versions are the run's" in said
    assert evaluated(pool, 1, run, "--weights", run / "model.pt")[0] == 1
    manifest = json.loads((run / "manifest.json").read_text())
    others: list[dict[str, Any]] = [
        {"torch": "2.9.0"},
        {"fingerprint": {}},
        {"hosts": ["a", "b"]},
        {"gpus": ["a", "b"]},
        {"lock_sha256": "0" * 64},
    ]
    for other in others:
        (run / "manifest.json").write_text(json.dumps({**manifest, **other}))
        status, printed, said = evaluated(pool, 1, run)
        assert (status, "val_loss" in printed) == (0, True), said


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors are deprecated
def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    model, file = build_model(ModelOptions(model="resnet18"), 1, 10, 8), tmp_path / "other.pt"
    kinds: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda v: v > 0, r"other\.pt: conv1\.weight, .* holds no floating-point numbers"),
        (lambda v: v.char(), r"other\.pt: conv1\.weight, .* holds no floating-point numbers"),
        (
            lambda v: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.qint8),
            r"conv1\.weight is quantized: give",
        ),
    ]
    for cast, says in kinds:
        torch.save({name: cast(value) for name, value in model.state_dict().items()}, file)
        with pytest.raises(InputError, match=says):
            load_all(model, file, "resnet18", "config.json")
    torch.save(model.half().state_dict(), file)
    load_all(model.float(), file, "resnet18", "config.json")  # with whole numbers of BatchNorm


def test_evaluate_on_another_folder_and_with_other_weights(
    pool: Pool, photo_run: Path, data: dict[int, tuple[str, list[Path]]], tmp_path: Path
) -> None:
    config = json.loads((photo_run / "config.json").read_text())
    moved = shutil.copytree(config["data_path"], tmp_path / "moved")
    own = json.loads(evaluated(pool, 1, photo_run)[1].splitlines()[-1])
    again = evaluated(pool, 2, photo_run, "--data-path", moved)[1].splitlines()[-1]
    assert json.loads(again) == own, "the same data at another place"
    (moved / "daisy" / "daisy 3.jpg").unlink()
    shutil.rmtree(moved / "rose")
    status, printed, said = evaluated(pool, 3, photo_run, "--data-path", moved)
    found = json.loads(printed.splitlines()[-1])
    assert (status, found["val_total"], found["held_out"]) == (0, 19, False), said
    assert f"--data-path {moved} has no images of rose" in f"{printed}{said}"
    shown = predicted(pool, photo_run, moved, "--json")[1].splitlines()
    answers = [json.loads(line) for line in shown]
    right = [answer["class"] == Path(answer["file"]).parent.name for answer in answers]
    assert (sum(right), len(right)) == (found["val_correct"], 19)
    lines = (photo_run / "evaluation" / "mistakes.jsonl").read_text().splitlines()
    mistakes = {entry["file"]: entry for entry in map(json.loads, lines)}
    wrong = [answer for answer, is_right in zip(answers, right, strict=True) if not is_right]
    assert mistakes.keys() == {answer["file"] for answer in wrong}
    for answer in wrong:
        entry = mistakes[answer["file"]]
        assert entry["class"] == Path(answer["file"]).parent.name
        assert entry["predicted"] == answer["class"]
        assert entry["probability"] == pytest.approx(answer["probability"], abs=1e-6)
    assert wrong, "a model without mistakes would prove nothing"
    inside = evaluated(
        pool, 1, photo_run, "--data-path", moved, "--output", moved / "tulip" / "out"
    )
    assert "--output" in refusal((inside[0], "", inside[2]))
    assert not (moved / "tulip" / "out").exists()
    weights = torch.load(photo_run / "model.pt")
    torch.save({name: value * 0 for name, value in weights.items()}, tmp_path / "zero.pt")
    zero = evaluated(pool, 2, photo_run, "--weights", tmp_path / "zero.pt")[1].splitlines()[-1]
    assert json.loads(zero)["val_loss"] == pytest.approx(np.log(3), abs=1e-12)


def test_bad_input_to_evaluate(pool: Pool, photo_run: Path, tmp_path: Path) -> None:
    def refused(*words: str | Path, run: Path = photo_run) -> str:
        status, printed, said = evaluated(pool, 1, run, *words)
        return refusal((status, "".join(re.findall("{.*", printed)), said))

    assert "none is not the folder of a run" in refused(run=tmp_path / "none")
    assert "has no sub-folders: make one per class" in refused("--data-path", tmp_path / "none")
    assert "--nproc must be at least 1" in refused("--nproc", "0")
    other = flowers(tmp_path / "other", 2, ("daisy", "lily"))
    assert "holds lily, but the classes of the run are daisy, rose, tulip" in refused(
        "--data-path", other
    )
    (other / "lily").rename(other / "tulip")
    torn = other / "tulip" / "lily 1.jpg"
    torn.write_bytes(torn.read_bytes()[:300])
    assert f"{torn} cannot be decoded" in refused("--data-path", other)
    config = json.loads((photo_run / "config.json").read_text())
    changed = shutil.copytree(photo_run, tmp_path / "changed")
    more = shutil.copytree(config["data_path"], tmp_path / "more")
    photo(more / "tulip" / "one more.jpg", 2)
    config["data_path"] = str(more)
    (changed / "config.json").write_text(json.dumps(config))
    assert "is not the data that" in refused(run=changed)
