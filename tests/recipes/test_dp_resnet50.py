"""Laws of dp_resnet50."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.errors import InputError
from common.group.devices import choose_devices
from common.training.models import ModelOptions, build_model, load_matching

# dp_resnet50


def test_an_unpacked_dataparallel_checkpoint_predicts_the_same_on_a_cpu(tmp_path: Path) -> None:
    options = ModelOptions(model="resnet18")
    model = build_model(options, 1, 10, 8)
    model(torch.randn(8, 1, 8, 8))  # BatchNorm's statistics are part of it
    wrapped = nn.DataParallel(model).eval()
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    torch.save(wrapped.state_dict(), tmp_path / "wrapped.pt")
    plain = build_model(options, 1, 10, 8).eval()
    _, left_out = load_matching(plain, tmp_path / "wrapped.pt")
    assert not left_out
    images = torch.randn(16, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain(images), wrapped(images))


def test_devices_are_taken_as_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(gpus: int, given: Any, device: str, **more: int) -> list[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        return [str(found) for found in choose_devices(given, device, **more)]

    def chosen(device: str, ids: tuple[int, ...] | None, gpus: int) -> list[str]:
        return choose(gpus, ids, device)

    assert chosen("auto", None, 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert chosen("auto", (2, 0), 3) == ["cuda:2", "cuda:0"]
    assert chosen("auto", None, 0) == ["cpu"]
    for device, ids, gpus in (("auto", (3,), 3), ("auto", (1, 1), 3), ("cpu", (0,), 3)):
        with pytest.raises(InputError, match="--device-ids"):
            chosen(device, ids, gpus)

    def named(*names: str, gpus: int = 2, device: str = "auto") -> list[str]:
        return choose(gpus, names or None, device, on_cpu=2)

    assert named() == ["cuda:0", "cuda:1"]
    assert named(gpus=0) == ["cpu", "cpu"]
    assert named("cuda:1", "cuda:0") == ["cuda:1", "cuda:0"]
    assert named("cpu", "cpu", "cpu") == ["cpu"] * 3
    for names in (("cuda:2",), ("cuda",), ("gpu",), ("cuda:-1",)):
        with pytest.raises(InputError, match="is not there"):
            named(*names)
    with pytest.raises(InputError, match="all cpu or all cuda"):
        named("cpu", "cuda:0")
