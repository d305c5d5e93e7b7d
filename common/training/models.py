"""Models by name, and what is easy to get silently wrong about them: norms, weights, freezing."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.errors import InputError
from common.group.collectives import agreed

log = logging.getLogger("recipes")


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    model: Literal["convnet", "resnet18", "resnet34", "resnet50"] = "convnet"
    """Model: a small one for small images, or one of torchvision's ResNets."""
    norm: Literal["auto", "group", "batch"] = "auto"
    """Normalisation. group does not look across the batch, so training is the same on any number of
    ranks; batch is what pretrained ResNets have. auto: group for convnet, batch for ResNets."""
    stem: Literal["auto", "small", "large"] = "auto"
    """First layers of a ResNet. large: 7x7 convolution with stride 2 and max-pooling, for photos;
    small: 3x3 with stride 1 and no pooling. auto: small for images below 64 px without --weights,
    which mostly come from the large one."""
    zero_init_residual: bool = False
    """Start each residual branch of a ResNet at zero (Goyal et al. 2017, section 5.1). It helps a
    ResNet-50 that is trained from nothing, and slows a ResNet-18 down (benchmarks/README.md)."""
    dropout: float = 0.0
    """Share of features dropped before convnet's last layer."""
    weights: Path | None = None
    """A state_dict to start from; entries whose shape differs are named and left out."""
    freeze_layers: bool = False
    """Train the last layer only."""
    channels_last: bool = False
    """Keep the channels of a pixel side by side in memory. On CPUs it depends on the model whether
    that is faster; on GPUs with bf16 or fp16 it should be, which was not measured."""
    compile: bool = False
    """Train the model as torch.compile makes it, which takes up to a minute at the start and a C++
    compiler; on CPUs it may be slower. Evaluation stays as it is."""

    def __post_init__(self) -> None:
        """Refuse combinations that mean nothing."""
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is a share, 0 to below 1, got {self.dropout}")
        if self.dropout and self.model != "convnet":
            raise ValueError("--dropout is an option of --model convnet")


class ConvNet(nn.Module):
    """Three 3x3 convolutions, global average pooling and one linear layer."""

    def __init__(
        self, channels: int, classes: int, norm: Callable[[int], nn.Module], dropout: float
    ):
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 32), (32, 64), (64, 64)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                norm(outputs),
                nn.ReLU(),
            ]
        layers.insert(6, nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(64, classes)
        # As in torchvision's ResNets: He et al. 2015 (arXiv 1502.01852). With torch's own default
        # this model learns more slowly, on some seeds much more (benchmarks/README.md).
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (samples, classes) of images (samples, channels, height, width)."""
        logits: Tensor = self.fc(self.dropout(self.features(images)))
        return logits


def build_model(options: ModelOptions, channels: int, classes: int, side: int = 224) -> nn.Module:
    """The named model, its last layer called `fc`.

    Args:
        options: see `ModelOptions`.
        channels: of the images; a ResNet's first convolution is made to fit.
        classes: size of the logits.
        side: of the images [px].
    """
    norm = options.norm
    if norm == "auto":
        norm = "group" if options.model == "convnet" else "batch"
    layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 8)
    if options.model == "convnet":
        return ConvNet(channels, classes, layer, options.dropout)
    from torchvision import models

    model: nn.Module = getattr(models, options.model)(
        num_classes=classes, norm_layer=layer, zero_init_residual=options.zero_init_residual
    )
    small = (
        side < 64 and options.weights is None if options.stem == "auto" else options.stem == "small"
    )
    if small:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model


def prepare_model(options: ModelOptions, channels: int, classes: int, side: int) -> nn.Module:
    """`build_model`, then its weights and freezing; what fails on one rank is raised on all."""
    with agreed():
        model = build_model(options, channels, classes, side)
        if options.weights:
            loaded, left_out = load_matching(model, options.weights)
            names = ", ".join(left_out) or "none"
            log.info(f"{options.weights}: {len(loaded)} entries loaded, left out: {names}")
        if options.freeze_layers:
            freeze_all_but_last(model)
        if options.channels_last:  # what passes through follows the weights
            model.to(memory_format=torch.channels_last)
        if options.compile and not shutil.which(os.environ.get("CXX", "g++")):
            raise InputError(
                "--compile needs a C++ compiler: install g++, or set CXX to one; the "
                "image has one with make image TARGET=development"
            )
    return model


def trained_as(options: ModelOptions, model: nn.Module) -> nn.Module:
    """`model` itself, or the compiled one that shares its parameters; `model` keeps their names."""
    if not options.compile:
        return model
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def load_matching(model: nn.Module, path: Path) -> tuple[list[str], list[str]]:
    """Load the entries of a weights file whose name and shape the model has.

    Args:
        model: changed in place.
        path: a `state_dict` saved by torch.save, with or without DataParallel's `module.` prefix,
            alone or under the key "state_dict" or "model".

    Returns:
        Names of the entries loaded, and of those of either side left out.

    Raises:
        InputError: no such file, no weights file, or nothing in it matches.
    """
    if not path.is_file():
        raise InputError(f"--weights {path} is not a file")
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise InputError(f"--weights {path} is no weights file that torch.load can read") from error
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise InputError(f"--weights {path} holds no state_dict (names to tensors)")
    found = {name.removeprefix("module."): value for name, value in found.items()}
    own = model.state_dict()
    matching = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
    if not matching:
        raise InputError(
            f"--weights {path} has no entry whose name and shape the model has: "
            f"its first are {', '.join(list(found)[:3]) or 'none'}; "
            f"the model's are {', '.join(list(own)[:3])}"
        )
    model.load_state_dict(matching, strict=False)
    return list(matching), sorted((own.keys() | found.keys()) - matching.keys())


def freeze_all_but_last(model: nn.Module) -> None:
    """Freeze everything but `model.fc`: parameters by requires_grad, statistics by eval mode."""
    model.requires_grad_(False)
    model.fc.requires_grad_(True)


def set_train_mode(model: nn.Module) -> None:
    """Like `model.train()`, except that a layer with nothing to train keeps its statistics.

    BatchNorm's running mean is no parameter: in train mode it moves even where frozen.
    """
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()


def has_trained_batch_norm(model: nn.Module) -> bool:
    """Whether a BatchNorm layer is among what trains."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and any(parameter.requires_grad for parameter in module.parameters())
        for module in model.modules()
    )
