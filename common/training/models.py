"""Models by name: normalisation, weights and freezing."""

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import log
from common.downloads import download_weights
from common.errors import InputError
from common.group.collectives import agreed
from common.reading import refuse_closed
from common.weights import without_prefix

_PHOTO_PX = 64
"""Images of this side or larger are treated as photos."""


@dataclass(frozen=True)
class ModelOptions:
    """The model and its initial weights."""

    model: Literal["auto", "convnet", "resnet18", "resnet34", "resnet50"] = "auto"
    """Model: convnet, a small network for small images, or a ResNet from torchvision.
    auto: convnet for images below 64 px, else resnet18."""
    norm: Literal["auto", "group", "batch"] = "auto"
    """Normalisation. auto: group for convnet, batch for ResNets.
    group treats each sample alone, so training is the same on any number of ranks.
    Pretrained ResNets use batch."""
    stem: Literal["auto", "small", "large"] = "auto"
    """First layers of a ResNet. large: 7x7 convolution with stride 2 and max-pooling, for photos.
    small: 3x3 with stride 1 and no pooling.
    auto: as in --weights (published weights need large), else small for images below 64 px."""
    zero_init_residual: bool = False
    """Start each residual branch of a ResNet at zero (Goyal et al. 2017, section 5.1).
    Without --weights, ResNet-50 then learns faster, ResNet-18 slower (benchmarks/README.md)."""
    dropout: float = 0.0
    """Share of features dropped before convnet's last layer."""
    weights: Path | None = None
    """File with the initial state_dict, also .safetensors; entries whose shape differs are named
    and skipped. A prefix of all names, such as module. or backbone., is taken off.
    --download gets a missing file of torchvision, such as resnet34-b627a593.pth."""
    freeze_layers: bool = False
    """Train the last layer only."""
    channels_last: bool = False
    """Memory layout with the channels of a pixel side by side. On CPUs some models are faster.
    On GPUs with bf16 or fp16 it should be faster."""
    compile: bool = False
    """Train with torch.compile; on CPUs it may be slower.
    It needs a C++ compiler, and up to a minute at the start. Evaluation is not compiled."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, got {self.dropout}")
        if self.dropout and self.model not in ("auto", "convnet"):
            raise ValueError("--dropout is an option of --model convnet")

    def for_images(self, side: int) -> "ModelOptions":
        """These options with a model's name for images of this side [px] in place of auto."""
        if self.model != "auto":
            return self
        if side >= _PHOTO_PX and self.dropout:
            raise InputError("--dropout is an option of --model convnet: give that, too")
        return replace(self, model="resnet18" if side >= _PHOTO_PX else "convnet")

    def resolved(self, side: int) -> dict[str, str]:
        """`norm` and `stem` without auto, for images of this side [px]."""
        norm = "group" if self.model == "convnet" else "batch"
        found = read_weights(self.weights) if self.weights else {}
        first = without_prefix(found, ["conv1.weight"])[0].get("conv1.weight")
        small = side < _PHOTO_PX if first is None else first.shape[-1] == 3
        stem = "small" if small else "large"
        return {
            "norm": norm if self.norm == "auto" else self.norm,
            "stem": stem if self.stem == "auto" else self.stem,
        }


class ConvNet(nn.Module):
    """Three 3x3 convolutions, global average pooling and one linear layer."""

    def __init__(
        self, channels: int, classes: int, norm: Callable[[int], nn.Module], dropout: float
    ):
        super().__init__()

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            return [convolution, norm(outputs), nn.ReLU()]

        self.features = nn.Sequential(
            *block(channels, 32),
            *block(32, 64),
            nn.MaxPool2d(2),
            *block(64, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(64, classes)
        # As in torchvision's ResNets (He et al. 2015, arXiv 1502.01852). With torch's default this
        # model learns more slowly, and much more slowly with some seeds (benchmarks/README.md).
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (samples, classes) of images (samples, channels, height, width)."""
        logits: Tensor = self.fc(self.dropout(self.features(images)))
        return logits


def build_model(options: ModelOptions, channels: int, classes: int, side: int = 224) -> nn.Module:
    """The model for images (samples, channels, side, side); its last layer is called `fc`.

    Raises:
        InputError: one of the sizes is 0, as in own data that do not say it.
    """
    if not channels or not classes or not side:
        raise InputError(
            f"Data(...) needs channels, class_names and side for --model {options.model}: got "
            f"{channels}, {classes} names and {side}; give them, or use a model of your own "
            "(docs/bring-your-own.md)"
        )
    options = options.for_images(side)
    chosen = options.resolved(side)
    norm = partial(nn.GroupNorm, 8) if chosen["norm"] == "group" else nn.BatchNorm2d
    if options.model == "convnet":
        return ConvNet(channels, classes, norm, options.dropout)
    from torchvision import models

    model: nn.Module = getattr(models, options.model)(
        num_classes=classes, norm_layer=norm, zero_init_residual=options.zero_init_residual
    )
    if chosen["stem"] == "small":
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model


def how_to_build(options: Mapping[str, Any], side: int) -> dict[str, str] | None:
    """What a plain script needs to build a run's model, for preprocessing.json.

    Args:
        options: of the run, by name; what was `auto` is resolved.
        side: of the images [px].

    Returns:
        Name of the model, the module that has it, and its normalisation and stem (`ModelOptions`).
        None: the run has no model of this module.
    """
    name: Any = options.get("model")
    if name == "convnet":
        return {"name": name, "from": "common.training.models", "norm": options["norm"]}
    if name == "auto" or name not in get_args(get_type_hints(ModelOptions)["model"]):
        return None  # an own model was trained, or one of another recipe
    # A recipe without --stem has its default.
    stem = options.get("stem") or ModelOptions(model=name).resolved(side)["stem"]
    return {"name": name, "from": "torchvision.models", "norm": options["norm"], "stem": stem}


def prepare_model(
    options: ModelOptions,
    channels: int,
    classes: int,
    side: int,
    dtype: torch.dtype,
    *,
    download: bool = False,
) -> nn.Module:
    """Build the model, load its weights and freeze its layers; an error reaches every rank.

    With `download`, rank 0 first gets a weights file of torchvision that is missing.
    """
    if options.weights:
        with agreed():
            if dist.get_rank() == 0:
                download_weights(options.model, options.weights, wanted=download)
    with agreed():
        # In its dtype before weights are loaded: those in float64 are not rounded to float32.
        model = move(build_model(options, channels, classes, side), torch.device("cpu"), dtype)
        if options.weights:
            loaded, left_out = load_matching(model, options.weights)
            names = ", ".join(left_out) or "none"
            log.info(f"{options.weights}: {len(loaded)} entries loaded, left out: {names}")
        elif options.freeze_layers:
            log.warning("--freeze-layers without --weights: all layers but the last stay random")
        if options.freeze_layers:
            freeze_all_but_last(model)
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            of = sum(p.numel() for p in model.parameters())
            log.info(f"--freeze-layers: {trained:,} of {of:,} parameters are trained")
        if options.channels_last:  # the activations follow the weights
            model.to(memory_format=torch.channels_last)
        if options.compile and not shutil.which(os.environ.get("CXX", "g++")):
            raise InputError(
                "--compile needs a C++ compiler: install g++, or set CXX to one; the "
                "image has one with make image TARGET=development"
            )
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        if options.compile and not header.is_file():
            raise InputError(f"--compile needs {header}: install python3-dev")
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """A `state_dict`, alone or under a key, or the tensors of a `.safetensors` file.

    Raises:
        InputError: no such file, not a weights file, or one with quantized tensors, which hardly
            any function of torch takes; or the package safetensors is missing.
    """
    refuse_closed("--weights", path)
    if not path.is_file():
        raise InputError(f"--weights {path} is not a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise InputError(
            f"--weights {path} needs the package safetensors: pip install safetensors"
        ) from None
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise InputError(f"--weights {path} {_why_not_loaded(path, error)}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise InputError(f"--weights {path} holds no state_dict (names to tensors)")
    if name := next((name for name, value in found.items() if value.is_quantized), None):
        raise InputError(
            f"--weights {path}: {name} is quantized: give a file with a dense model's finite "
            "weights"
        )
    return found


def _why_not_loaded(path: Path, error: Exception) -> str:
    """Why `torch.load` takes no file with other objects than tensors, and how to make one."""
    if path.suffix == ".safetensors":
        return f"is not a weights file: {error}"
    names = re.findall(r"GLOBAL (\S+) was not an allowed global", str(error))
    with suppress(Exception):  # it knows only torch's format of today, and names all objects
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) or names
    if not names:
        return "is not a weights file: torch.load failed"
    lines = (
        "import sys, torch; d = torch.load(sys.argv[1], 'cpu', weights_only=False); "
        "d = d if hasattr(d, 'state_dict') else d.get('state_dict', d.get('model', d)); "
        "torch.save(d.state_dict() if hasattr(d, 'state_dict') else d, sys.argv[2])"
    )
    files = shlex.join([str(path), f"{path.with_suffix('')}.tensors.pt"])
    return (
        f"holds objects beside tensors ({', '.join(sorted(names)[:5])}), and loading them runs its "
        f"author's code. If you trust the author, make a file of the tensors: python -c "
        f'"{lines}" {files}'
    )


def load_matching(model: nn.Module, path: Path) -> tuple[list[str], list[str]]:
    """Load the entries of a weights file (`read_weights`) whose name and shape fit the model.

    A prefix of all names that is not the model's is taken off, and the log says so.

    Returns:
        Names of the loaded entries, and names of the file's and the model's other entries.

    Raises:
        InputError: as `read_weights`, no entry fits, or an entry is not finite.
    """
    own = model.state_dict()
    found, prefix = without_prefix(read_weights(path), own)
    if prefix:
        log.info(f"{path}: {prefix} is taken off all names")
    matching = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
    if not matching:
        raise InputError(
            f"--weights {path} has no entry that fits the model by name and shape: its first "
            f"entries are {', '.join(list(found)[:3]) or 'none'}, the model's are "
            f"{', '.join(list(own)[:3])}"
        )
    if bad := [name for name, value in matching.items() if not _fits(value, own[name])]:
        raise InputError(
            f"--weights {path}: {', '.join(bad[:3])} is sparse, has no data, is not finite, or "
            "holds no floating-point numbers where the model does: give a file with a dense "
            "model's finite weights"
        )
    model.load_state_dict(matching, strict=False)
    return list(matching), sorted((own.keys() | found.keys()) - matching.keys())


def _fits(value: Tensor, own: Tensor) -> bool:
    """Whether a tensor has data, finite numbers, and real ones if `own` has; torch would cast."""
    if value.layout != torch.strided or value.is_meta:
        return False
    if own.is_floating_point() and not value.is_floating_point():
        return False
    if value.is_complex():
        return own.is_complex() and bool(value.isfinite().all())
    return bool(value.double().isfinite().all())


def freeze_all_but_last(model: nn.Module) -> None:
    """Freeze the parameters of all layers but `model.fc`; `set_train_mode` freezes statistics."""
    model.requires_grad_(False)
    model.fc.requires_grad_(True)


def set_train_mode(model: nn.Module) -> None:
    """Call `model.train()`, but leave frozen layers in eval mode.

    In train mode, a BatchNorm layer with frozen parameters would still change its statistics. A
    module with a frozen parameter of its own is no frozen layer if something below it is trained.
    """
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in module.parameters()):
            module.eval()  # with what is below, which is frozen, too


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return `model.to(device, dtype)`, but leave complex numbers complex.

    torch would keep their real part only (2.15, and it just warns).
    """

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(device, dtype)
        return tensor.to(device, dtype.to_complex() if tensor.is_complex() else None)

    model._apply(moved)
    return model


def has_trained_batch_norm(model: nn.Module) -> bool:
    """Whether some BatchNorm layer is trained."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and any(parameter.requires_grad for parameter in module.parameters())
        for module in model.modules()
    )
