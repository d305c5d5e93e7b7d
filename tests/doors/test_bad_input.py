"""Bad input ends with status 2 and one line; trouble while training with status 1 and one line."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings, strategies
from PIL import Image

from common import cli
from common.data.datasets import DataOptions, load_data
from common.data.image_folder import list_images
from common.errors import InputError
from common.launch.ranks import Ranks
from common.parse import given_path
from common.run.claim import refuse_unwritable
from common.snapshots.snapshot_files import _find, list_snapshots
from common.training.models import ModelOptions, build_model, load_matching
from recipes.ddp_launch.train import Config
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.images import flowers
from tests.helpers.machine import need_root
from tests.helpers.pool import Pool, call_main, in_group
from tests.helpers.run_folders import Harmless, a_run
from tests.helpers.training import assert_refused
from tools import predict, reproduce, trained
from tools.fresh import fresh_environment


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--lrr 3", r"--lrr.*perhaps you meant --lr"),
        ("--epochs none", "epochs"),
        ("--epochs 0", "--epochs must be at least 1"),
        ("--model vgg16", "vgg16.*resnet34"),
        ("--backend mpi", "wheels are built without MPI"),
        ("--backend nccl --device cpu", "nccl needs GPUs"),
        ("--batch-size 32", "perhaps you meant --global-batch-size or --batch-size-per-rank"),
        ("--batch_size=32", "perhaps you meant --global-batch-size or --batch-size-per-rank"),
        ("--quiet", r"options: --quiet\. --help lists"),
        ("--best-by accuracy", r"begins with val_, such as val_accuracy"),
        ("--syncBN", r"perhaps you meant --sync-bn\)"),
        ("--syncBN False", "perhaps you meant --no-sync-bn"),
        ("--freeze-layers False", "a flag takes no value: --sync-bn turns it on, --no-sync-bn"),
        ("--local_rank 0", r"^(?!.*perhaps).*leave it out: every launcher sets it"),
        ("--num_classes 5", r"^(?!.*perhaps).*leave it out: the data have as many classes"),
        ("--device 0,1", "GPUs' numbers in CUDA_VISIBLE_DEVICES"),
        ("--nproc_per_node=2", "perhaps you meant --nproc"),
        ("--world-size 4", "perhaps you meant --nproc"),
        ("--dist-url tcp://127.0.0.1:23456", "perhaps you meant --master-addr"),
        ("--learning-rate 3", r"--learning-rate, 3 \(perhaps you meant --lr\)"),
        ("--device cuda:1", "give --device cuda, and .* CUDA_VISIBLE_DEVICES"),
        ("--clip-grad-norm 0", "--clip-grad-norm must be positive"),
        ("--optimizer adamw --momentum 1", "--momentum must be below 1"),
        ("--global-batch-size 96 --batch-size-per-rank 48", "not both"),
        ("--data imagefolder", "needs --data-path"),
        ("--data-path photos --model resnet18", "--data-path has no effect: .*--data imagefolder"),
        (
            "--data imagefolder --data-path photos --download",
            "--download has no effect: it gets the flower photos, if",
        ),
        ("--lrf 0.5 --lr-schedule constant", "--lrf has no effect: --lr-schedule constant keeps"),
        ("--download", "--download has no effect: --data digits needs no download"),
        ("--no-verify-images", "--verify-images has no effect: only --data imagefolder"),
        ("--stem large", "--stem has no effect: only ResNets"),
        ("--zero-init-residual", "--zero-init-residual has no effect: only ResNets"),
        (
            "--model resnet18 --weights x.pt --zero-init-residual",
            "--zero-init-residual has no effect: --weights holds these weights",
        ),
        ("--tf32 --device cpu", "--tf32 has no effect: it is for GPUs, and --device is cpu"),
        ("--no-pin-memory --device cpu", "--pin-memory has no effect: it is for GPUs"),
        ("--timeout-s nan", "--timeout-s"),
        ("--timeout-s 9e15", "--timeout-s must be from 1 to 10000000"),
        ("--cpu-threads 100000", "--cpu-threads must be from 1 to 1024"),
        ("--weight-decay inf", "--weight-decay must be a finite number"),
        ("--epoch 3", r"--epoch, 3 \(perhaps you meant --epochs\)"),
        ("--virtual-ranks 3", "not a power of two: 2 or 4 would be"),
        ("--virtual-ranks 2 --sync-bn", "and --sync-bn"),
        ("--virtual-ranks 2 --accumulate 2", "leave out --accumulate"),
        (
            "--global-batch-size 96 --accumulate 5",
            "--accumulate 5 does not divide a rank's batch of 96: give .* 95 or 100",
        ),
        ("--accumulate 0", "at least 1"),
        ("--virtual-ranks 4 --global-batch-size 90", "global batch of 90: 88 or 92 samples"),
        ("--master-port 70000", "65535"),
        ("--nnodes 2", "--master-addr"),
        ("--restarts -1", "--restarts must be at least 0"),
        ("--restarts 2 --nnodes 2 --master-addr 10.0.0.1", "torchrun --max-restarts, or .* Slurm"),
        ("--shrink --virtual-ranks 2", "--shrink needs --restarts"),
        ("--shrink --restarts 2", "--shrink needs --virtual-ranks: fewer processes would give"),
        (
            "--shrink --restarts 2 --virtual-ranks 2 --batch-size-per-rank 8",
            "--shrink needs --global-batch-size",
        ),
    ],
)
def test_options_that_cannot_work(pool: Pool, options: str, says: str) -> None:
    assert_refused(pool, says, *options.split())


NUMBERS = [
    (path.parent.name, f"--{option.name.replace('_', '-')}")
    for path in sorted((ROOT / "recipes").glob("*/train.py"))
    for group in fields(import_module(f"recipes.{path.parent.name}.train").Config)
    for option in fields(group.type)  # type: ignore[arg-type]
    if {int, float} & {option.type, *get_args(option.type)}
]
"""Every numeric option of every recipe."""


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    number=strategies.sampled_from(NUMBERS),
    value=strategies.sampled_from(
        ["0", "-1", "1", "nan", "inf", "-inf", "9e15", "1e308", str(2**63), str(10**30), "", "x"]
    )
    | (strategies.integers() | strategies.floats()).map(str),
)
def test_a_number_is_accepted_or_refused_in_one_line(number: tuple[str, str], value: str) -> None:
    name, option = number
    config = import_module(f"recipes.{name}.train").Config
    with contextlib.suppress(InputError):
        cli.parse(name, config, [f"{option}={value}"])


def test_a_recipe_that_ends_or_is_no_text_is_named(recipe: Recipe, tmp_path: Path) -> None:
    """`sys.exit()` when a train.py is imported trains nothing."""
    folder = tmp_path / "copy"
    for name in ("common", "recipes", "tools"):
        shutil.copytree(ROOT / name, folder / name)
    train = folder / "recipes" / "ddp_launch" / "train.py"
    train.write_bytes(train.read_bytes().replace(b"# data\n", b"# \xff\n"))
    end = '\nimport sys; sys.exit(0)  # NAME = "ddp_launch"\n'
    (folder / "recipes" / "ddp_spawn" / "train.py").write_text(f'"""Own."""{end}')
    env = fresh_environment() | {"PYTHONPATH": str(folder)}
    own = ["ddp_spawn", "--nproc", "2", "--device", "cpu"]
    for words, status, says in (([], 0, "DistributedDataParallel"), (own, 2, "sys.exit(0)")):
        command = [sys.executable, "-m", "recipes", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert says in done.stdout + done.stderr


def test_a_rank_left_in_the_shell_through_the_front_door(recipe: Recipe) -> None:
    result = recipe.module("ddp_launch", env={"RANK": "1"})
    assert (result.status, len(result.errors)) == (2, 1)
    assert "RANK=1 is set" in result.errors[0]
    assert "unset RANK" in result.errors[0]


def test_inputs_that_cannot_work(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no weights")
    torch.save({"other.weight": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save({"fc.weight": Harmless(tmp_path / "code ran")}, tmp_path / "crafted.pt")
    (tmp_path / "file").write_text("")
    unusable = {
        "nan": torch.tensor([float("nan")] * 10),
        "sparse": torch.zeros(10).to_sparse(),
        "meta": torch.zeros(10, device="meta"),
        "complex": torch.zeros(10, dtype=torch.complex64),
    }
    for name, value in unusable.items():
        torch.save({"fc.bias": value}, tmp_path / f"{name}.pt")
    torch.save({0: torch.zeros(10)}, tmp_path / "integers.pt")
    for options, says in (
        (["--data", "imagefolder", "--data-path", tmp_path / "none"], "is not a folder"),
        (["--data", "cifar10", "--data-path", tmp_path], "--download"),
        (["--weights", tmp_path / "none.pt"], "is not a file"),
        (["--weights", tmp_path / "text.pt"], "not a weights file"),
        (["--weights", tmp_path / "other.pt"], "no entry"),
        (["--weights", tmp_path / "crafted.pt"], "holds objects beside tensors"),
        (["--weights", tmp_path / "integers.pt"], "integers.pt holds no state_dict"),
        (["--resume", tmp_path / "none.pt"], "is not a file"),
        (["--global-batch-size", "2000"], "more than the 1437 samples"),
        (["--norm", "batch", "--sync-bn"], "SyncBatchNorm refuses CPUs"),
        (["--sync-bn", "--accumulate", "2"], "but --accumulate computes it in parts"),
    ):
        assert_refused(pool, says, "--output-dir", tmp_path / "run", *options)
    for name in unusable:
        weights, says = tmp_path / f"{name}.pt", f"{name}.pt: fc.bias is .*not finite"
        assert_refused(pool, says, "--weights", weights, "--output-dir", tmp_path / "run")
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder, says in (
        (tmp_path / "file", r"made \(\S+/file is a file, not a folder\): choose another"),
        (tmp_path / "file" / "below", r"made \(\S+/file is a file, not a folder\): choose"),
        (tmp_path / "dangling", r"dangling is a link to nowhere, which does not exist\): choose"),
        (tmp_path / "dangling" / "below", r"dangling is a link to nowhere, which does not exist"),
        (Path("/"), "--output-dir / is the root of the file system: choose a folder of its own"),
        (Path("/tmp/.."), "--output-dir /tmp/.. is the root of the file system"),
    ):
        assert_refused(pool, says, "--output-dir", folder)
        assert_refused(pool, says, "--output-dir", folder, name="tune_loader")
    assert_refused(
        pool, "choose a shorter path", "--output-dir", Path("x" * 200, *["x" * 200] * 19)
    )
    assert not (tmp_path / "code ran").exists()


def test_a_tilde_is_the_home_folder_in_every_path(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it as it is in --output-dir=~/run, and in quotes."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home))
    options = [f"--{name}=~/x" for name in ("output-dir", "data-path", "weights", "resume")]
    options.append("--data=imagefolder")
    _, config = cli.parse("ddp_launch", import_module("recipes.ddp_launch.train").Config, options)
    paths = (config.run.output_dir, config.data.data_path, config.model.weights, config.run.resume)
    assert set(paths) == {home / "x"}
    tune = import_module("recipes.tune_loader.train").Config
    _, config = cli.parse("tune_loader", tune, [*options[:2], options[-1]])
    assert {config.tune.output_dir, config.data.data_path} == {home / "x"}
    for path in ("a~", "a/~", str(home / "~")):
        assert given_path(path) == Path(path)
    result = recipe.module("predict", "~/file", "~/file", env={"HOME": str(home)})
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert str(home / "file") in result.errors[0]
    result = recipe.module("ddp_launch", "--output-dir", "~nobody-of-this-name/x")
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert "~nobody-of-this-name/x: there is no home folder of this name" in result.errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert sorted(path.name for path in home.iterdir()) == ["file"]


@contextlib.contextmanager
def as_user(number: int) -> Iterator[None]:
    os.setresuid(number, number, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_what_may_not_be_read_is_named_with_its_group() -> None:
    """In a container, --user drops the groups that a login has."""
    need_root()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        photos, weights = flowers(root / "photos"), root / "weights.pt"
        torch.save({}, weights)
        nested = photos / "tulip" / "more"
        nested.mkdir()
        (photos / "tulip" / ".hidden").mkdir(mode=0o700)
        shutil.copy(next((photos / "tulip").glob("*.jpg")), nested / "more.jpg")
        model = build_model(ModelOptions(), 1, 10, 8)
        snapshot = root / "step_00000001.0123456789abcdef.pt"
        runs = root / "snapshots"
        runs.mkdir()

        def images() -> None:
            listing, _ = list_images(photos)
            assert len(listing.names) == 21

        with as_user(12345):
            images()
        for closed, read in (
            (root, images),
            (photos, images),
            (photos / "tulip", images),
            (nested, images),
            (weights, lambda: load_matching(model, weights)),
            (root, lambda: load_matching(model, weights)),
            (root, lambda: _find(snapshot, Path("/nowhere"), {})),
            (runs, lambda: _find("auto", runs, {})),
        ):
            mode = closed.stat().st_mode
            os.chown(closed, 0, 54321)
            closed.chmod(0o750)
            with as_user(12345), pytest.raises(InputError) as refused:
                read()
            closed.chmod(mode)
            assert re.search(
                rf"^--(data-path|weights|resume|output-dir) {root}/.*cannot be read: {closed} "
                r"belongs to user 0, group 54321, and you are user 12345: .*give "
                r"--group-add 54321$",
                str(refused.value),
            )


def test_a_closed_run_is_not_called_altered_or_no_run() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        run = root / "run"
        run.mkdir()
        model = build_model(ModelOptions(), 1, 10, 8)
        a_run(run, "ddp_launch", Config(), model)
        image = root / "images" / "one.png"
        image.parent.mkdir()
        Image.new("L", (8, 8)).save(image)

        def load() -> None:
            trained.read(run).model(None, torch.device("cpu"))

        with as_user(12345):
            load()
            reproduce.read(run)
            predict.listed([image], 1)
        for closed, read in (
            (run, load),
            (run, lambda: reproduce.read(run)),
            (run / "config.json", load),
            (run / "summary.json", load),
            (run / "model.pt", load),
            (run / "metrics.jsonl", lambda: reproduce.read(run)),
            (image.parent, lambda: predict.listed([image], 1)),
            (image, lambda: predict.listed([image], 1)),
        ):
            mode = closed.stat().st_mode
            closed.chmod(0)
            with (
                as_user(12345),
                pytest.raises(InputError, match=f"cannot be read: {closed} belongs to user 0"),
            ):
                read()
            closed.chmod(mode)


def test_closed_images_and_data_sets_are_not_called_damaged_or_missing(pool: Pool) -> None:
    need_root()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        photos = flowers(root / "photos")
        image = next((photos / "tulip").glob("*.jpg"))
        cases = [("imagefolder", photos, image)]
        for data, folder in (
            ("cifar10", "cifar-10-batches-py"),
            ("fashion_mnist", "FashionMNIST/raw"),
        ):
            file = root / data / folder / "train"
            file.parent.mkdir(parents=True)
            file.touch()
            cases += [(data, root / data, closed) for closed in (root / data, file.parent, file)]
        for data, path, closed in cases:
            mode = closed.stat().st_mode
            closed.chmod(0o700 if closed.is_dir() else 0o600)
            ((found, said),) = pool.run(in_group, 1, load_as_user, data, path)
            closed.chmod(mode)
            assert found == "InputError", said
            assert re.match(
                rf"--data-path {path}.* cannot be read: {closed} belongs to user 0", said
            )


def load_as_user(ranks: Ranks, data: Any, path: Path) -> tuple[str, str]:
    """Type and text of the error."""
    with as_user(12345):
        try:
            load_data(DataOptions(data=data, data_path=path), 0, ranks)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def test_what_a_run_went_on_with_and_what_it_was_before_are_both_kept(
    pool: Pool, tmp_path: Path
) -> None:
    options = ["--nproc", "1", "--output-dir", str(tmp_path / "run")]
    file = tmp_path / "run" / "manifest.json"
    for steps, changed in ((2, {}), (4, {"torch": "1.0", "hosts": ["a"]}), (6, {"hosts": ["b"]})):
        if changed:
            file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
        arguments = [*options, "--max-steps", str(steps)]
        assert pool.run(call_main, 1, "ddp_launch", arguments)[0][0] == 0
    manifest = json.loads(file.read_text())
    assert manifest["before"] == [
        {"until_step": 2, "torch": "1.0", "hosts": ["a"]},
        {"until_step": 4, "hosts": ["b"]},
    ]
    assert manifest["torch"] == torch.__version__
    said = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert re.findall(r"resuming from .*:", said) == ["resuming from step 2 with another torch:"]


def test_a_model_that_nothing_here_can_compile(recipe: Recipe) -> None:
    result = recipe("ddp_launch", "--nproc", "2", "--compile", env={"CXX": "no-such-compiler"})
    assert (result.status, len(result.errors)) == (2, 1)
    assert "--compile needs a C++ compiler" in result.errors[0]


@pytest.mark.slow
def test_a_folder_of_photos_trains_and_writes_its_classes(recipe: Recipe, tmp_path: Path) -> None:
    """Names with spaces and beyond ASCII; a ResNet with weights, its last layer trained alone."""
    root = flowers(tmp_path / "my photos", per_class=15, names=("gänse blümchen", "薔薇"))
    torch.manual_seed(0)
    weights = build_model(ModelOptions(model="resnet18"), 3, 1000).state_dict()
    torch.save(weights, tmp_path / "resnet18.pth")
    result = recipe(
        *"ddp_launch --data imagefolder --data-path".split(),
        root,
        *"--image-size 32 --model resnet18 --weights".split(),
        tmp_path / "resnet18.pth",
        *(
            "--freeze-layers --sync-bn --global-batch-size 6 --epochs 3 --num-workers 1 "
            "--epoch-weights --lr 0.02"
        ).split(),
    ).assert_ok()
    assert "left out: fc.bias, fc.weight" in result.stdout
    assert "--sync-bn has no effect" in result.stdout
    classes = (result.folder / "class_indices.json").read_text(encoding="utf-8")
    assert "gänse blümchen" in classes
    assert (result.summary["val_total"], result.summary["steps"]) == (6, 12)
    trained = torch.load(result.folder / "model.pt", weights_only=True)
    frozen = [name for name in trained if not name.startswith("fc.")]
    assert len(frozen) > 50
    for name in frozen:
        assert torch.equal(trained[name], weights[name]), "frozen layers do not move"
    assert len(list((result.folder / "weights").iterdir())) == 3


@pytest.mark.slow
def test_one_rank_in_three_is_refused_by_one_line(recipe: Recipe) -> None:
    result = recipe("ddp_spawn", "--nproc", "3", "--global-batch-size", "64")
    assert (result.status, len(result.errors)) == (2, 1), result.stderr
    assert "63 or 66" in result.errors[0]


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".log"}


def test_a_folder_of_another_run_is_left_as_it_is(pool: Pool, tmp_path: Path) -> None:
    run = ["--max-steps", "3", "--output-dir", str(tmp_path / "run")]
    assert pool.run(call_main, 1, "ddp_launch", ["--nproc", "1", *run])[0][0] == 0
    before = contents(tmp_path / "run")
    assert len(before) > 5
    for options, says in (
        (["--lr", "0.2"], r"lr 0\.1 there, 0\.2 here"),
        (["--model", "resnet18"], "model 'convnet' there, 'resnet18' here"),
        (["--resume", "never"], "holds snapshots"),
    ):
        assert_refused(pool, says, *run, *options)
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("dp_scratch --nproc 2", "--nproc 2, but dp_scratch with these options needs one process"),
        ("ddp_spawn --nnodes 2 --master-addr 10.0.0.1", "on one host only"),
        ("ddp_launch --nproc 1 --data imagefolder --data-path photos", "photos is not a folder"),
        ("ddp_launch --nproc 1 --global-batch-size 1438", "more than the 1437 samples"),
        ("ddp_launch --nproc 1 --weights none.pth", "--weights none.pth is not a file"),
        ("dp_scratch --batch-size-per-rank 32", "batch size 64, 330 steps (22 per epoch), "),
        ("tune_loader", "the options fit; data, model and folder were not looked at"),
    ],
)
def test_check_says_what_the_run_would(pool: Pool, command: str, says: str) -> None:
    name, *options = command.split()
    ((status, said, errors),) = pool.run(call_main, 1, name, [*options, "--check"])
    *_, line = errors.splitlines() if status else said.splitlines()
    assert line.startswith("error: " if status else "ok: ")
    assert says in line
    assert status == (2 if errors else 0)


def test_a_check_of_two_ranks_ends_with_one_line_and_keeps_nothing(recipe: Recipe) -> None:
    done = recipe.module("model_parallel_toy", "--schedule", "gpipe", "--check").assert_ok()
    assert done.stdout == (
        "ok: 1,600 training and 400 validation samples, batch size 96, 320 steps (16 per epoch), "
        "model.pt of 660 bytes, a snapshot about 1,980\n"
    )
    assert not list(recipe.tmp_path.iterdir())


def test_a_check_looks_at_the_run_that_would_go_on(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def ended(*options: str) -> tuple[int, str]:
        words = ["--nproc", "1", "--output-dir", str(folder), *options]
        ((status, said, errors),) = pool.run(call_main, 1, "ddp_launch", words)
        return status, errors if status else said

    def checked(*options: str) -> tuple[int, str]:
        """The answer of a check, which changes nothing."""
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        answer = ended(*options, "--check")
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        return answer

    assert ended("--max-steps", "3", "--snapshot-every", "2")[0] == 0
    newest = list_snapshots(folder / "snapshots")[0]
    intact = newest.read_bytes()
    newest.write_bytes(intact[:-1])
    (newest.parent / "step_00000004.0123456789abcdef.tmp").write_bytes(b"a writer was killed")
    assert "3 steps (14 per epoch) after step 2" in checked("--max-steps", "5")[1]
    newest.write_bytes(intact)
    assert "2 steps (14 per epoch) after step 3" in checked("--max-steps", "5")[1]
    assert checked("--max-steps", "5", "--seed", "1") == (
        2,
        f"error: folder {folder} is of another run (seed 0 there, 1 here): choose another "
        f"--output-dir; to train its model further, give --weights {folder / 'model.pt'} and "
        "another --output-dir\n",
    )


def test_a_check_refuses_a_folder_that_a_run_could_not_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    refuse_unwritable(run)
    assert not list(run.iterdir())
    text = "import sys, pathlib; from common.owner import lock; f = lock(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", f"{text}; print(1, flush=True); input()", str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as owner:
        assert owner.stdout
        owner.stdout.readline()
        with pytest.raises(InputError, match=f"still going .*process {owner.pid}"):
            refuse_unwritable(run)
        owner.communicate(b"\n", timeout=60)
    refuse_unwritable(run)
    with pytest.raises(InputError, match="root of the file system"):
        refuse_unwritable(Path("/"))
    (run / ".lock").unlink()
    (run / ".lock").mkdir()
    with pytest.raises(InputError, match=r"\.lock is no file: move it away"):
        refuse_unwritable(run)
    for unlikely in ("n" * 256, f"{'n' * 250}/" * 16):
        with pytest.raises(InputError, match="File name too long"):
            refuse_unwritable(tmp_path / unlikely)


def test_a_run_that_a_check_started_is_no_check(recipe: Recipe, tmp_path: Path) -> None:
    env = {"RECIPES_CHECK": str(tmp_path)}
    done = recipe("ddp_launch", "--nproc", "1", "--max-steps", "1", env=env).assert_ok()
    assert (done.folder / "model.pt").exists()
