"""Laws of dp_scratch."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.data.datasets import DataOptions, digits_data
from recipes.dp_scratch import train as dp_scratch
from recipes.dp_scratch.lenet import initialize
from recipes.dp_scratch.lesson import show_diversity
from tests.helpers.gradients import CPU, largest_difference
from tests.helpers.pool import Pool, call_main

# dp_scratch


class LeNet(nn.Module):
    """The same network by torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(self.conv1(images).relu(), 2)
        x = nn.functional.avg_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(50, 1, 28, 28, dtype=torch.float64, generator=generator),
            torch.randint(0, 10, (50,), generator=generator),
        )
        for _ in range(count)
    ]


def by_hand(devices: int, steps: int = 20) -> list[dict[str, Tensor]]:
    """Every device's parameters after some steps; 50 samples are not divided by 3 devices."""
    torch.manual_seed(0)
    replicas = dp_scratch.Replicas(initialize(torch.float64), [CPU] * devices)
    for images, labels in batches(steps):
        dp_scratch.train_step(replicas, images, labels, lr=0.1)
    return replicas.copies


def test_by_hand_on_several_devices_is_one_device_and_torchs_own_layers() -> None:
    model = LeNet().double()
    torch.manual_seed(0)
    model.load_state_dict(initialize(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches(20):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    theirs = dict(model.named_parameters())
    for devices in (1, 2, 3):
        for copy_ in by_hand(devices):
            assert largest_difference(copy_, theirs) < 1e-10


def test_without_the_all_reduce_the_copies_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dp_scratch, "all_reduce", lambda tensors: None)
    first, second = by_hand(2, steps=2)
    assert largest_difference(first, second) > 1e-4


def test_show_prints_what_each_device_holds_before_and_after(pool: Pool, tmp_path: Path) -> None:
    options = ["--show", "--devices", "cpu", "cpu", "cpu", "--output-dir", str(tmp_path / "run")]
    ((status, printed, said),) = pool.run(call_main, 1, "dp_scratch", options)
    assert status == 0, said
    assert not (tmp_path / "run").exists(), "it trains nothing"
    steps = re.split(r"(?m)^(?=before|after|the gradient)", printed)[1:]
    held = [[json.loads(line) for line in re.findall(r"\[.*\]", step)] for step in steps]
    (batch,), parts, gradients, sums, (whole,) = held
    assert [row for part in parts for row in part] == batch, "the parts are the batch, in its order"
    assert [len(part) for part in parts] == [3, 2, 2]
    assert gradients == [[sum(column) for column in zip(*part, strict=True)] for part in parts]
    assert sums == [whole] * 3 == [[sum(column) for column in zip(*batch, strict=True)]] * 3


def test_a_larger_batch_of_copies_brings_nothing(tmp_path: Path) -> None:
    train = digits_data(DataOptions(image_size=28), 0).train

    class Batches(list[Any]):
        keys: Any

    def load(size: int) -> Any:
        loaded = train.__getitems__([(0, index) for index in range(size)])
        batches = Batches([loaded])
        batches.keys = SimpleNamespace(samples=256)
        return batches, None

    torch.manual_seed(0)
    show_diversity(dp_scratch.Replicas(initialize(torch.float32), [CPU]).copies[0], load, tmp_path)
    found = json.loads((tmp_path / "diversity.json").read_text())
    different, copied = found["different samples"], found["one sample copied"]
    assert different["1"] < different["8"] - 0.2 < different["64"] - 0.4 < 0.6
    assert list(copied.values()) == pytest.approx([different["1"]] * 3, abs=1e-5)
