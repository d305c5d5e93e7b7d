"""The faults of docs/what-the-tutorials-get-wrong.md: faulty lines in our words, beside ours."""

import argparse
import copy
import hashlib
import json
import re
import shlex
import statistics
import sys
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, IterableDataset
from torchvision.models import ResNet34_Weights

from common import cli, downloads
from common.data.loaders import Loader, loader_options
from common.data.stream import FixedBatches, GlobalBatches
from common.group.devices import choose_device
from common.launch.ranks import Ranks, resolve
from common.training.evaluation import evaluate
from common.training.models import ModelOptions, build_model, load_matching, set_train_mode
from recipes.ddp_launch.train import Config
from recipes.dp_resnet50.train import Config as LessonConfig
from recipes.dp_scratch.train import all_reduce
from recipes.tune_loader.streams import ItemStream
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.images import flowers, served, small_fashion_mnist
from tests.helpers.pool import Pool, call_main, in_group

PAGE = ROOT / "docs" / "what-the-tutorials-get-wrong.md"


def test_every_fault_on_the_page_names_a_test_that_exists() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    there = {
        name for path in files for name in re.findall(r"(?m)^def (test_\w+)", path.read_text())
    }
    parts = re.split(r"(?m)^(?=\*\*|## )", PAGE.read_text())
    faults = [part for part in parts if part.startswith("**") and "saw them" not in part]
    assert len(faults) >= 12
    for fault in faults:
        named = set(re.findall(r"`(test_\w+)`", fault))
        assert named, f"no test: {fault}"
        assert named <= there, named - there


# Which samples


def test_a_padded_sampler_counts_a_sample_twice_and_ours_counts_each_once() -> None:
    """11 samples on 2 ranks, as the page shows them; a model is right on sample 0 alone."""
    padded: list[list[int]] = [
        list(DistributedSampler(range(11), 2, rank, shuffle=False))  # type: ignore[arg-type]
        for rank in (0, 1)
    ]
    ours = [[[i for _, i in keys] for keys in FixedBatches(11, 2, rank, 2)] for rank in (0, 1)]
    for name, shares in (
        ("DistributedSampler", padded),
        ("FixedBatches", [list(chain(*batches)) for batches in ours]),
    ):
        for rank, share in enumerate(shares):
            row = f"{name:<20} rank {rank}: {' '.join(map(str, share))}"
            assert row in PAGE.read_text(), row
    assert sum(index == 0 for share in padded for index in share) / 12 == pytest.approx(
        0.1667, abs=1e-4
    )
    assert sorted(chain(*chain(*ours))) == list(range(11)), "which gives 1/11 = 0.0909"


def test_without_set_epoch_every_epoch_has_the_same_order() -> None:
    torchs: DistributedSampler[int] = DistributedSampler(range(64), 2, 0)  # type: ignore[arg-type]
    assert list(torchs) == list(torchs), "the caller forgot set_epoch"
    ours = GlobalBatches(64, [4, 4], 0, 0)
    first = [[index for _, index in keys] for keys in ours]
    ours.set_epoch(1)
    assert [[index for _, index in keys] for keys in ours] != first


class Unsharded(IterableDataset[int]):
    """A stream as it is often written: nobody tells it which part is its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_an_unsharded_stream_gives_every_item_to_every_loading_process() -> None:
    options = loader_options(2, pin_memory=False)
    seen = [item for rank in (0, 1) for item in Loader(Unsharded(), None, **options)]
    assert sorted(map(int, seen)) == sorted([*range(8)] * 4), "2 ranks x 2 processes"
    ours = [
        Loader(ItemStream(lambda: range(8), int, 4, rank, 2), None, **options) for rank in (0, 1)
    ]
    assert sorted(chain(*(batch.tolist() for share in ours for batch in share))) == [*range(8)]


def test_the_mean_of_the_batches_is_not_the_mean_of_the_samples() -> None:
    """Five samples in batches of 2, 2 and 1: the last sample would count twice."""
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    batches = list(zip(logits.split(2), labels.split(2), strict=True))
    faulty = sum(float(cross_entropy(*batch)) for batch in batches) / 3
    exact = float(cross_entropy(logits, labels))
    assert abs(faulty - exact) > 0.01
    ours = in_group(Ranks(), lambda _: evaluate(torch.nn.Identity(), batches, 5))
    assert ours.means["loss"] == pytest.approx(exact, rel=1e-12)


# Gradients and models


def rebinding_all_reduce(tensors: list[Tensor]) -> None:
    """The sum is right on the first device; the others' entries of the list become new tensors."""
    for other in tensors[1:]:
        tensors[0] += other
    for place in range(1, len(tensors)):
        tensors[place] = tensors[0].clone()


def test_without_zero_grad_a_step_goes_by_all_gradients_so_far() -> None:
    def trained(momentum: float, *, clears: bool) -> Tensor:
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        for _ in range(4):
            if clears:
                optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
        return weight.detach()

    forgotten = trained(0.0, clears=False)
    assert torch.allclose(forgotten, trained(1.0, clears=True), rtol=1e-12)
    assert not torch.allclose(forgotten, trained(0.0, clears=True))


def test_an_all_reduce_that_rebinds_list_entries_leaves_the_devices_as_they_were() -> None:
    def reduced(function: object) -> tuple[list[float], list[float]]:
        held = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
        assert callable(function)
        function(list(held))
        return held[0].tolist(), held[1].tolist()

    assert reduced(rebinding_all_reduce) == ([11.0, 22.0], [10.0, 20.0])
    assert reduced(all_reduce) == ([11.0, 22.0], [11.0, 22.0])


def test_dataparallel_copies_one_set_of_weights_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's `forward` and `replicate`; CPU tensors stand in for what they send between 2 GPUs."""
    broadcasts: list[Tensor] = []

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool) -> list[list[Tensor]]:
        if not detach:
            broadcasts.extend(tensors)
            return [[tensor * 1 for tensor in tensors] for _ in devices]
        return [tensors, [tensor.clone() for tensor in tensors]]  # the first device: its own

    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    module = sys.modules["torch.nn.parallel.data_parallel"]
    monkeypatch.setattr(module, "_get_available_device_type", lambda: None)  # also with GPUs
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    norm: Any = model[1]
    mean = norm.running_mean
    images, labels = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))

    wrapped: Any = nn.DataParallel(model)
    wrapped.device_ids, wrapped.output_device = [0, 1], 0
    wrapped.src_device_obj = torch.device("cpu")
    wrapped.scatter = lambda inputs, *_: ([(part,) for part in inputs[0].chunk(2)], [{}, {}])
    copies: list[nn.Module] = []

    def apply(replicas: list[nn.Module], inputs: list[tuple[Tensor]], _: object) -> list[Tensor]:
        copies.extend(replicas)
        return [replica(*part) for replica, part in zip(replicas, inputs, strict=True)]

    wrapped.parallel_apply, wrapped.gather = apply, lambda outputs, _: torch.cat(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 3):
        plain = copy.deepcopy(model)
        optimizer.zero_grad()
        cross_entropy(wrapped(images), labels).backward()
        assert len(broadcasts) == step * len(list(model.parameters())), "all are sent again"
        assert not any(list(replica.parameters()) for replica in copies), "nothing to update"
        parts = [plain(part) for part in images.chunk(2)]
        cross_entropy(torch.cat(parts), labels).backward()
        for ours, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert whole.grad is not None
            assert torch.allclose(ours.grad, whole.grad, rtol=1e-12), "added up, not averaged"
        optimizer.step()
    assert norm.running_mean is mean
    assert norm.num_batches_tracked == 2, "of 4 forward passes through BatchNorm"


def test_two_processes_are_at_most_twice_as_fast_as_one() -> None:
    """The page's figure, from the record of the comparison."""
    runs = json.loads((ROOT / "benchmarks/peers/results/peers.json").read_text())["runs"]
    one, two = (
        statistics.median(run["steps_per_s"] for run in runs[processes]["bare"])
        for processes in ("1", "2")
    )
    assert two / one <= 2
    assert f"{two:.0f} steps/s on 2 processes, {one:.0f} on one" in PAGE.read_text()


def test_a_flag_of_type_bool_is_true_whatever_it_is_given() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync-bn", type=bool, default=True)
    assert parser.parse_args(["--sync-bn", "False"]).sync_bn is True
    _, config = cli.parse("ddp_launch", Config, ["--no-sync-bn"])
    assert config.parallel.sync_bn is False


def test_a_frozen_batch_norm_in_train_mode_moves_and_ours_does_not() -> None:
    def moved(to_train_mode: object) -> bool:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).requires_grad_(False)
        assert callable(to_train_mode)
        to_train_mode(model)
        model(torch.ones(4, 1, 5, 5))
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        return bool(norm.running_mean.any())

    assert moved(nn.Module.train)
    assert not moved(set_train_mode)


def test_weights_are_chosen_by_shape_and_not_by_their_number_of_values(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, tmp_path / "weights.pt")
    model, found = nn.Linear(2, 3), torch.load(tmp_path / "weights.pt")
    own = model.state_dict()
    faulty = {name: value for name, value in found.items() if own[name].numel() == value.numel()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(faulty, strict=False)
    assert load_matching(model, tmp_path / "weights.pt") == (["bias"], ["weight"])


def test_a_snapshot_without_the_optimizer_goes_on_differently() -> None:
    def trained(snapshot: str) -> Tensor:
        """Weights after four steps with momentum; after two, a run is resumed from `snapshot`."""
        torch.manual_seed(0)
        model, inputs = nn.Linear(3, 1), torch.ones(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            if step == 2 and snapshot != "none":
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
                if snapshot == "weights and optimizer":
                    optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    assert not torch.allclose(trained("weights"), trained("none"))
    assert torch.equal(trained("weights and optimizer"), trained("none"))


# Ranks and devices


def test_a_device_by_rank_or_by_node_rank_is_wrong_from_the_second_host_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts with four GPUs each, as torchrun describes them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    by_rank, by_node_rank, ours = [], [], []
    for rank in range(8):
        env = {"RANK": rank, "LOCAL_RANK": rank % 4, "GROUP_RANK": rank // 4, "WORLD_SIZE": 8}
        env |= {"LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 29500}
        ranks = resolve({**{k: str(v) for k, v in env.items()}, "MASTER_ADDR": "a"})
        by_rank.append(env["RANK"])
        by_node_rank.append(env["GROUP_RANK"])
        ours.append(choose_device("auto", ranks).index)
    assert by_rank[4:] == [4, 5, 6, 7], "the second host has GPUs 0 to 3"
    assert by_node_rank == [0] * 4 + [1] * 4, "four processes on one GPU"
    assert ours == [0, 1, 2, 3] * 2


def wrapped(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A rank's own initial weights, and its weights after DDP has wrapped the model."""
    torch.manual_seed(ranks.rank)
    model = nn.Linear(3, 2)
    own = model.weight.detach().clone()
    DistributedDataParallel(model)
    return own, model.weight.detach()


def test_initial_weights_need_no_file_in_tmp(pool: Pool, tmp_path: Path) -> None:
    hosts = [tmp_path / "tmp of host 0", tmp_path / "tmp of host 1"]
    for host in hosts:
        host.mkdir()
    torch.save({}, hosts[0] / "initial_weights.pt")  # by rank 0
    with pytest.raises(FileNotFoundError):
        torch.load(hosts[1] / "initial_weights.pt")
    (first, ours), (second, theirs) = pool.run(in_group, 2, wrapped)
    assert not torch.equal(first, second)
    assert torch.equal(ours, first)
    assert torch.equal(theirs, first)


# What the tutorials train on


def main_with_a_mirror(
    ranks: Ranks, address: str, digits: str, arguments: list[str]
) -> tuple[int, str, str]:
    """ddp_launch's main() with the flower photos and ResNet-18's weights at `address`."""
    published = SimpleNamespace(url=f"{address}resnet18-{digits[:8]}.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloads, "FLOWER_PHOTOS", f"{address}flower_photos.tgz")
        patch.setattr(downloads, "FLOWER_PHOTOS_MD5", digits)
        patch.setattr("torchvision.models.get_model_weights", lambda _: [published])
        return call_main(ranks, "ddp_launch", arguments)


@pytest.mark.slow
def test_flower_photos_and_weights_are_downloaded_on_request_and_checked(
    tmp_path: Path, pool: Pool
) -> None:
    """Small stand-ins from a server on loopback, through the command line."""
    mirror, store = tmp_path / "mirror", tmp_path / "store"
    flowers(mirror / "flower_photos")
    with tarfile.open(mirror / "flower_photos.tgz", "w:gz") as archive:
        archive.add(mirror / "flower_photos", "flower_photos")
    content = (mirror / "flower_photos.tgz").read_bytes()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    torch.save(build_model(ModelOptions(model="resnet18"), 3, 1000).state_dict(), mirror / "file")
    sha256 = hashlib.sha256((mirror / "file").read_bytes()).hexdigest()[:8]
    for digits in (sha256, "00000000"):
        (mirror / f"resnet18-{digits}.pth").symlink_to("file")

    def train(address: str, digits: str, *more: str | Path) -> tuple[int, str]:
        """`digits` begin the MD5 of the archive, or the SHA-256 of the weights."""
        options = "--nproc 1 --image-size 32 --model resnet18 --num-workers 0 --data imagefolder"
        arguments = [*options.split(), "--global-batch-size", "8", "--max-steps", "1", *more]
        arguments += ["--data-path", store / "flower_photos"]
        given = [str(argument) for argument in arguments]
        ((status, printed, said),) = pool.run(main_with_a_mirror, 1, address, digits, given)
        return status, printed + said

    out = ("--output-dir", tmp_path / "run")
    status, said = train("http://127.0.0.1:9/", "0", *out)
    assert (status, "is not a folder: add --download" in said) == (2, True), said
    status, said = train("http://127.0.0.1:9/", "0", *out, "--download")  # no server there
    assert (status, "cannot download http://127.0.0.1:9/flower_photos.tgz" in said) == (2, True)
    with served(mirror) as address:
        status, said = train(address, "0" * 32, *out, "--download")
        assert (status, "corrupted" in said) == (2, True), said
        assert not list(store.iterdir()), "another file than the published one leaves nothing"
        status, said = train(address, md5, *out, "--download")
        assert status == 0, said
        assert [path.name for path in store.iterdir()] == ["flower_photos"]

        out = ("--output-dir", tmp_path / "with weights")
        file, wrong = store / f"resnet18-{sha256}.pth", store / "resnet18-00000000.pth"
        status, said = train(address, sha256, *out, "--weights", file)
        assert (status, "is not a file: add --download to get http" in said) == (2, True), said
        status, said = train(address, "00000000", *out, "--weights", wrong, "--download")
        assert (status, "invalid hash value" in said, wrong.exists()) == (2, True, False), said
        status, said = train(address, sha256, *out, "--weights", file, "--download")
        assert (status, "left out: fc.bias, fc.weight" in said) == (0, True), said
        assert file.is_file()


def test_the_page_gives_the_addresses_and_checksums_that_are_used() -> None:
    page = (ROOT / "docs" / "flower-photos.md").read_text()
    for fact in (
        downloads.FLOWER_PHOTOS,
        downloads.FLOWER_PHOTOS_MD5,
        ResNet34_Weights.DEFAULT.url,
    ):
        assert fact in page


@pytest.mark.slow
def test_the_lessons_commands_on_one_and_two_gpus_work(
    recipe: Recipe, pool: Pool, tmp_path: Path
) -> None:
    """The page's own commands are known options; one step of each, on a few images and the CPU."""
    small_fashion_mnist(tmp_path / "data")
    page = (ROOT / "recipes" / "dp_resnet50" / "README.md").read_text()
    (one,) = re.findall(r'RECIPE=dp_resnet50 ARGS="(--data fashion_mnist [^"]+)"', page)
    first, second = (
        f"--device-ids {more}"
        for more in ("0 --global-batch-size 256 --lr 0.1", "0 1 --global-batch-size 512 --lr 0.2")
    )
    assert first in one
    assert f"For two GPUs, give `{second}`" in page
    commands = [one, one.replace(first, second)]
    for command, (gpus, batch) in zip(commands, (("0", "256"), ("0 1", "512")), strict=True):
        given = shlex.split(command.replace(f"--device-ids {gpus}", ""))
        given[given.index("--data-path") + 1] = str(tmp_path / "data")
        given += ["--output-dir", str(tmp_path / batch)]
        less = ["--global-batch-size", "4", "--max-steps", "1"]  # the last of two options counts
        ((status, _, said),) = pool.run(call_main, 1, "dp_resnet50", [*given, *less])
        assert status == 0, said
    assert cli.parse("dp_resnet50", LessonConfig, shlex.split(commands[1])), "on two GPUs"
