"""Weights by name and shape, freezing, and the model's own laws."""

import shlex
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from common.errors import InputError
from common.seeds import choose_precision, mixed_precision
from common.training.models import (
    ModelOptions,
    build_model,
    freeze_all_but_last,
    has_trained_batch_norm,
    load_matching,
    read_weights,
    set_train_mode,
)
from recipes.dp_resnet50.train import Autocast
from tests.helpers.pool import Pool
from tests.helpers.training import training


def test_weights_of_matching_shape_load_and_the_others_are_named(tmp_path: Path) -> None:
    other = build_model(ModelOptions(), 1, 5, 8)
    path = tmp_path / "weights.pt"
    torch.save({f"module.{name}": value for name, value in other.state_dict().items()}, path)
    model = build_model(ModelOptions(), 1, 10, 8)
    before = model.state_dict()["fc.weight"].clone()
    loaded, left_out = load_matching(model, path)
    assert left_out == ["fc.bias", "fc.weight"]
    assert torch.equal(model.state_dict()["fc.weight"], before)
    assert set(loaded) == other.state_dict().keys() - set(left_out)
    for name in loaded:
        assert torch.equal(model.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize(("side", "other_side"), [(8, 224), (224, 8)])
def test_the_first_layers_are_those_of_the_weights(
    tmp_path: Path, side: int, other_side: int
) -> None:
    """A finished run's model can be trained further; published weights need the large stem."""
    trained = build_model(ModelOptions(model="resnet18"), 3, 10, side)
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    options = ModelOptions(model="resnet18", weights=tmp_path / "model.pt")
    for size in (side, other_side):
        model = build_model(options, 3, 10, size)
        assert load_matching(model, tmp_path / "model.pt")[1] == []


def test_weights_in_float64_are_not_rounded(pool: Pool, tmp_path: Path) -> None:
    given = build_model(ModelOptions(), 1, 10, 8).double().state_dict()
    given = {name: value + 1e-12 for name, value in given.items()}
    torch.save(given, tmp_path / "given.pt")
    training(
        pool,
        1,
        tmp_path / "run",
        run={"precision": "fp64"},
        model={"weights": tmp_path / "given.pt"},
        optimizer={"max_steps": 1, "lr": 1e-15},
    )
    trained = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    for name, value in trained.items():
        assert torch.allclose(value, given[name], rtol=0, atol=1e-13), "fp32 would be 1e-9 off"


def test_weights_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelOptions(), 1, 10, 8)
    with pytest.raises(InputError, match="is not a file"):
        load_matching(model, tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(InputError, match="not a weights file"):
        load_matching(model, tmp_path / "text.pt")
    given = {"model": model.state_dict(), "args": Namespace(lr=0.1)}
    for name, content in (("args", given), ("module", model)):
        file = tmp_path / f"{name} of somebody.pt"
        torch.save(content, file)
        with pytest.raises(InputError, match="holds objects beside tensors") as refused:
            load_matching(model, file)
        said, _, command = str(refused.value).partition("make a file of the tensors: python ")
        assert ("argparse.Namespace" if name == "args" else "ConvNet") in said
        _, code, *files = shlex.split(command)
        monkeypatch.setattr(sys, "argv", ["-c", *files])
        exec(code)
        assert len(load_matching(model, file.with_name(f"{file.stem}.tensors.pt"))[0]) > 3
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="no state_dict"):
        load_matching(model, tmp_path / "list.pt")
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(InputError, match=r"no entry .*encoder\.weight.*features\.0\.weight"):
        load_matching(model, tmp_path / "other.pt")


def test_a_resnet_begins_with_torchvisions_weights() -> None:
    torch.manual_seed(0)
    ours = build_model(ModelOptions(model="resnet18"), channels=3, classes=7, side=224)
    torch.manual_seed(0)
    theirs = models.resnet18(num_classes=7).state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("options", [ModelOptions(norm="batch"), ModelOptions(model="resnet18")])
def test_frozen_layers_do_not_move_and_neither_do_their_statistics(options: ModelOptions) -> None:
    torch.manual_seed(0)
    model = build_model(options, channels=3, classes=4)
    freeze_all_but_last(model)
    set_train_mode(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 3, 32, 32) + 5).square().sum().backward()
        optimizer.step()
    moved = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert moved == {"fc.weight", "fc.bias"}
    assert not has_trained_batch_norm(model)


class Positions(nn.Module):
    """Has a frozen parameter itself, and layers below it."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_parameter_does_not_put_the_layers_below_it_into_eval_mode(frozen: bool) -> None:
    model = Positions()
    model.head.requires_grad_(False)
    model.norm.requires_grad_(not frozen)
    set_train_mode(model)
    in_eval_mode = {name for name, module in model.named_modules() if not module.training}
    below = {name for name, _ in model.named_modules()}
    assert in_eval_mode == (below if frozen else {"head"}), "dropout and statistics, too"


def test_train_mode_lets_trained_batch_norm_learn_its_statistics() -> None:
    model = build_model(ModelOptions(norm="batch"), 1, 4, 8)
    set_train_mode(model)
    model(torch.randn(4, 1, 8, 8) + 5)
    assert has_trained_batch_norm(model)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.running_mean is not None and norm.running_mean.any() for norm in norms)


@pytest.mark.parametrize("model", ["convnet", "resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_model_takes_its_images_in_either_norm(model: str, channels: int) -> None:
    for norm in ("auto", "group", "batch"):
        options = ModelOptions(model=model, norm=norm)  # type: ignore[arg-type]
        built = build_model(options, channels, classes=7).eval()
        with torch.no_grad():
            assert built(torch.zeros(2, channels, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
def test_data_that_do_not_say_their_sizes_need_a_model_of_their_own(model: Any) -> None:
    for sizes in ((0, 10, 8), (1, 0, 8), (1, 10, 0)):
        needs = rf"needs channels, class_names and side for --model {model}: got {sizes[0]}, "
        with pytest.raises(InputError, match=needs):
            build_model(ModelOptions(model=model), *sizes)


def test_photos_get_a_resnet_unless_a_model_is_given() -> None:
    for side, name, given in ((63, "convnet", "auto"), (64, "resnet18", "auto")):
        assert ModelOptions(model=given).for_images(side).model == name  # type: ignore[arg-type]
    assert ModelOptions(model="convnet").for_images(224).model == "convnet"
    with pytest.raises(InputError, match="--dropout is an option of --model convnet"):
        ModelOptions(dropout=0.5).for_images(224)


def test_options_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="--dropout"):
        ModelOptions(dropout=1.0)
    with pytest.raises(ValueError, match="convnet"):
        ModelOptions(model="resnet18", dropout=0.5)


@pytest.mark.parametrize(
    ("device", "capability", "chosen"),
    [
        ("cuda", (7, 0), "fp32"),  # V100
        ("cuda", (7, 5), "fp32"),  # T4
        ("cuda", (8, 0), "bf16"),  # A100
        ("cuda", (8, 9), "bf16"),  # L4
        ("cuda", (9, 0), "bf16"),  # H100
        ("cuda", (12, 0), "bf16"),  # RTX 5090
        ("cpu", (9, 0), "fp32"),
    ],
)
def test_auto_is_bf16_where_a_gpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for asked, expected in (("auto", chosen), ("fp32", "fp32"), ("bf16", "bf16")):
        assert choose_precision(asked, torch.device(device)) == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_copy_in_a_thread_computes_in_the_precision_that_was_asked_for(precision: str) -> None:
    """As in DataParallel's threads, where autocast is on, but for the device's usual type."""
    device = torch.device("cpu")
    _, autocast, _ = mixed_precision(precision, device)
    model = Autocast(nn.Linear(3, 2), autocast)

    def logits() -> Any:
        with torch.autocast("cpu", enabled=precision != "fp32"):
            return model(torch.ones(4, 3))

    with autocast, ThreadPoolExecutor(2) as threads:
        found = [threads.submit(logits).result().dtype for _ in range(2)]
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    assert found == [expected, expected]


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "net.", "backbone.", "module._orig_mod."]
)
def test_a_prefix_of_all_names_is_taken_off_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    caplog.set_level("INFO", "recipes")
    given = build_model(ModelOptions(model="resnet18"), 3, 10, 8).state_dict()
    path = tmp_path / "given.pt"
    torch.save({"state_dict": {f"{prefix}{name}": given[name] for name in given}}, path)
    options = ModelOptions(model="resnet18", weights=path)
    model = build_model(options, 3, 10, 224)  # the stem, too, is that of the weights
    assert load_matching(model, path)[1] == []
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    assert caplog.messages == [f"{path}: {prefix} is taken off all names"]
    torch.save({f"{prefix}{n}" if n[0] == "f" else n: given[n] for n in given}, path)
    assert f"{prefix}fc.bias" in load_matching(model, path)[1], "it is not on all names"


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    model = nn.ModuleDict({"net": nn.Linear(2, 3)})
    torch.save(model.state_dict(), tmp_path / "own.pt")
    assert load_matching(model, tmp_path / "own.pt")[1] == []
    assert read_weights(tmp_path / "own.pt").keys() == {"net.weight", "net.bias"}, "for its hash"
    around = nn.ModuleDict({"module": model})
    torch.save(around.state_dict(), tmp_path / "around.pt")
    assert load_matching(model, tmp_path / "around.pt")[1] == []


def test_safetensors_are_read_and_without_the_package_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "given.safetensors"
    path.write_bytes(b"no such file")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(InputError, match=r"safetensors: pip install safetensors$"):
            read_weights(path)
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(InputError, match=r"is not a weights file: .*header"):
        read_weights(path)
    model = build_model(ModelOptions(), 1, 10, 8)
    safetensors.save_file({f"model.{k}": v for k, v in model.state_dict().items()}, path)
    other = build_model(ModelOptions(), 1, 10, 8)
    assert load_matching(other, path)[1] == []
    same = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in same)
