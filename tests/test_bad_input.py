"""Bad input ends with status 2 and one line; trouble while training with status 1 and one line."""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies

from common.data.image_folder import list_images
from common.errors import InputError
from common.training.models import ModelOptions, build_model, load_matching
from tests.conftest import ROOT, Recipe, need_root
from tests.pool import Pool, call_main
from tests.test_data import faulty_folder, flowers
from tests.test_snapshot import Harmless


def assert_refused(pool: Pool, says: str, *options: str | Path, name: str = "ddp_launch") -> None:
    """Status 2, one `error:` line and no traceback."""
    given = ["--nproc", "1"] if name == "ddp_launch" else []
    ((status, _, said),) = pool.run(call_main, 1, name, [*given, *map(str, options)])
    assert status == 2, f"status {status}\n{said}"
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert re.search(says, errors[0]), errors[0]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--lrr 3", r"--lrr.*perhaps you meant --lr"),
        ("--epochs none", "epochs"),
        ("--epochs 0", "--epochs must be at least 1"),
        ("--model vgg16", "vgg16.*resnet34"),
        ("--backend mpi", "wheels are built without MPI"),
        ("--backend nccl --device cpu", "nccl needs GPUs"),
        ("--scale-lr 256 --global-batch-size 5000", "global batch of 5000 needs --warmup-epochs"),
        ("--batch-size 32", "say --global-batch-size or --batch-size-per-rank"),
        ("--batch_size=32", "say --global-batch-size or --batch-size-per-rank"),
        ("--syncBN", "say --sync-bn"),
        ("--nproc_per_node=2", "say --nproc N"),
        ("--world-size 4", "say --nproc N"),
        ("--dist-url tcp://127.0.0.1:23456", "--master-addr and --master-port"),
        ("--device cuda:1", "give --device cuda, and .* CUDA_VISIBLE_DEVICES"),
        ("--clip-grad-norm 0", "--clip-grad-norm must be positive"),
        ("--optimizer adamw --momentum 1", "--momentum must be below 1"),
        ("--global-batch-size 96 --batch-size-per-rank 48", "not both"),
        ("--data imagefolder", "needs --data-path"),
        ("--timeout-s nan", "--timeout-s"),
        ("--timeout-s 9e15", "--timeout-s must be from 1 to 10000000"),
        ("--cpu-threads 100000", "--cpu-threads must be from 1 to 1024"),
        ("--weight-decay inf", "--weight-decay must be a finite number"),
        ("--epoch 3", r"--epoch, 3 \(perhaps you meant --epochs\)"),
        ("--virtual-ranks 3", "not a power of two: 2 or 4 would be"),
        ("--virtual-ranks 2 --sync-bn", "and --sync-bn"),
        ("--virtual-ranks 2 --accumulate 2", "leave out --accumulate"),
        ("--accumulate 5", "--accumulate 5 does not divide a rank's batch of 96: 95 or 100"),
        ("--accumulate 0", "at least 1"),
        ("--virtual-ranks 4 --global-batch-size 90", "global batch of 90: 88 or 92 samples"),
        ("--check-replicas -1", "--check-replicas must be at least 0"),
        ("--audit 5", "--audit needs --virtual-ranks"),
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
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = import_module(f"recipes.{name}.train").main(["--check", f"{option}={value}"])
    assert status in (0, 2), said.getvalue()
    assert said.getvalue().count("error:") == (status == 2), said.getvalue()
    assert "Traceback" not in said.getvalue()


def test_a_wrong_option_through_the_front_door(recipe: Recipe) -> None:
    result = recipe("ddp_spawn", "--lrr", "3")
    assert result.status == 2
    assert result.stderr.startswith("error: Unrecognized options: --lrr")
    assert result.stderr.count("\n") == 1


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
        (["--weights", tmp_path / "crafted.pt"], "not a weights file"),
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
    assert_refused(pool, "cannot be written", "--output-dir", tmp_path / "file" / "below")
    assert_refused(
        pool, "choose a shorter path", "--output-dir", Path("x" * 200, *["x" * 200] * 19)
    )
    assert not (tmp_path / "code ran").exists()


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
        model = build_model(ModelOptions(), channels=1, classes=10)

        def images() -> None:
            _, files, _, _ = list_images(photos, seed=0)
            assert len(files) == 21

        with as_user(12345):
            images()
        for closed, read in (
            (root, images),
            (photos, images),
            (photos / "tulip", images),
            (nested, images),
            (weights, lambda: load_matching(model, weights)),
            (root, lambda: load_matching(model, weights)),
        ):
            mode = closed.stat().st_mode
            os.chown(closed, 0, 54321)
            closed.chmod(0o750)
            with as_user(12345), pytest.raises(InputError) as refused:
                read()
            closed.chmod(mode)
            assert re.search(
                rf"^--(data-path|weights) {root}/.*cannot be read: {closed} belongs to user 0, "
                r"group 54321, and you are user 12345: .*give --group-add 54321$",
                str(refused.value),
            )


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


def test_device_cuda_without_one(pool: Pool) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert_refused(pool, "sees no GPU", "--device", "cuda")


@pytest.mark.parametrize(
    "fault", ["truncated JPEG", "text named .jpg", "empty class", "no classes"]
)
def test_image_folders_that_cannot_work(pool: Pool, tmp_path: Path, fault: str) -> None:
    says = faulty_folder(tmp_path / "my data", fault)
    root = tmp_path / "my data" / ("daisy" if fault == "no classes" else "")
    run = tmp_path / "run"
    assert_refused(pool, says, "--data", "imagefolder", "--data-path", root, "--output-dir", run)


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
        "ddp_launch",
        "--data",
        "imagefolder",
        "--data-path",
        root,
        "--image-size",
        "32",
        "--model",
        "resnet18",
        "--weights",
        tmp_path / "resnet18.pth",
        "--freeze-layers",
        "--sync-bn",
        "--global-batch-size",
        "6",
        "--epochs",
        "3",
        "--num-workers",
        "1",
        "--epoch-weights",
        "--lr",
        "0.02",
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
    for name in ("ddp_launch", "ddp_spawn"):
        result = recipe(name, "--nproc", "3", "--global-batch-size", "64", folder=name)
        assert result.status == 2
        assert len(result.errors) == 1
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


@pytest.mark.slow
def test_a_loss_that_is_not_finite(recipe: Recipe) -> None:
    result = recipe("ddp_spawn", "--lr", "1e30", "--log-every", "2")
    assert result.status == 1
    assert len(result.errors) == 1, result.stderr
    assert re.match(r"error: rank \d on \S+: .*not finite.*--lr", result.errors[0])
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_an_error_at_once_where_it_was_given(recipe: Recipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, env in ((["--master-port", port], {}), ([], {"MASTER_PORT": port})):
            start_s = time.monotonic()
            result = recipe("ddp_launch", "--nproc", "2", *options, env=env)
            assert result.status == 2
            assert len(result.errors) == 1
            assert f"port {port}" in result.errors[0]
            assert time.monotonic() - start_s < 10


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("dp_scratch --nproc 2", 2),
        ("ddp_spawn --nnodes 2 --master-addr 10.0.0.1", 2),
        ("dp_scratch --batch-size-per-rank 32", 0),
    ],
)
def test_check_says_what_the_run_would(recipe: Recipe, command: str, status: int) -> None:
    result = recipe.module(*command.split(), "--check")
    assert (result.status, len(result.errors)) == (status, status // 2)


@pytest.mark.slow
def test_unknown_recipes_and_nproc_where_there_are_ranks(recipe: Recipe) -> None:
    result = recipe.module("ddp_lunch")
    assert (result.status, result.errors) == (
        2,
        ["error: no recipe 'ddp_lunch': did you mean ddp_launch?"],
    )
    result = recipe("ddp_launch", "--nproc", "4", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert result.status == 2
    assert "already one of 1" in result.errors[0]
    result = recipe("ddp_launch", "--restarts", "4", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert (result.status, len(result.errors)) == (2, 1)
    assert "torchrun started this process, and only a launcher can restart" in result.errors[0]
