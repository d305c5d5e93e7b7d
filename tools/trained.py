"""A finished run's model, as the run's folder describes it (`predict`, `evaluate`, `sample`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from common.errors import InputError
from common.seeds import mixed_precision
from common.training.models import ModelOptions, build_model, load_matching

G = TypeVar("G")


@dataclass(frozen=True)
class Trained:
    """A finished run on images."""

    folder: Path
    config: dict[str, Any]
    """The run's options, resolved."""
    preprocessing: dict[str, Any]
    summary: dict[str, Any]
    fingerprint: str
    """Of the data that it trained on."""

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return int(self.preprocessing["channels"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by index."""
        return list(self.preprocessing["classes"])

    def prepared(self, image: Tensor) -> Tensor:
        """The bytes (channels, side, side) that the model sees of an RGB image (3, ...)."""
        image = image[: self.channels]  # all three of a grey image are equal
        resized = functional.resize(image, self.preprocessing["resize"])
        cropped: Tensor = functional.center_crop(resized, self.preprocessing["crop"])
        return cropped

    def options(self, group: type[G], **other: Any) -> G:
        """An option group as the run had it, with `other` values."""
        return options_of(self.config, group, **other)

    def model(self, weights: Path | None, device: torch.device) -> tuple[nn.Module, torch.dtype]:
        """The model in eval mode, and the dtype of its images.

        Args:
            weights: a file with a state_dict. None: the run's model.pt.
            device: where the model goes.

        Raises:
            InputError: the file does not fit the model.
        """
        options, side = self.options(ModelOptions), self.preprocessing["crop"]
        model = build_model(options, self.channels, len(self.classes), side)
        load_all(model, weights or self.folder / "model.pt", options.model, self.folder)
        if options.channels_last:  # it decides the last bits
            model.to(memory_format=torch.channels_last)
        dtype, _, _ = mixed_precision(self.config["precision"], device)
        return model.to(device, dtype).eval(), dtype


def read(folder: Path) -> Trained:
    """Read the folder of a finished run on images.

    Raises:
        InputError: it is no such folder; says which file is missing or damaged.
    """
    config = read_config(folder)
    if config.get("model") not in get_args(get_type_hints(ModelOptions)["model"]):
        raise InputError(
            f"{folder} holds no image classifier that can be rebuilt: give a run of ddp_launch, "
            "ddp_spawn, dp_resnet50, or model_parallel_toy --model resnet50"
        )
    refuse_unfinished(folder)
    names = ("preprocessing", "summary", "manifest")
    preprocessing, summary, manifest = (_read(folder / f"{name}.json") for name in names)
    return Trained(folder, config, preprocessing, summary, manifest["data_fingerprint"])


def read_config(folder: Path) -> dict[str, Any]:
    """The options of a run, resolved.

    Raises:
        InputError: it is no folder of a run, or the file is damaged.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not the folder of a run: it holds no config.json")
    return _read(folder / "config.json")


def refuse_unfinished(folder: Path) -> None:
    """Raise InputError if the run has not finished."""
    if not (folder / "summary.json").is_file():
        raise InputError(
            f"the run in {folder} has not finished: run its command again with --output-dir "
            f"{folder} to resume it"
        )


def options_of(config: dict[str, Any], group: type[G], **other: Any) -> G:
    """An option group with the values in `config`, and `other` values."""
    names = [option.name for option in fields(group)]  # type: ignore[arg-type]
    return group(**{name: config[name] for name in names if name in config} | other)


def load_all(model: nn.Module, weights: Path, name: str, folder: Path) -> None:
    """Load every entry of a model, by `name` in the run's folder.

    Raises:
        InputError: the file does not fit the model.
    """
    _, left_out = load_matching(model, weights)
    if left_out:
        raise InputError(
            f"{weights} does not fit {name} as in {folder}/config.json: {len(left_out)} entries "
            f"differ, the first is {left_out[0]}. A recipe with a model of its own needs its own "
            "script"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: train again with this version") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}): restore it, or train again") from None
    return content


def refuse_unusable(paths: Sequence[Path], channels: int, *, named: bool = False) -> None:
    """Read the headers of images. A damaged file is left to the decoder, which says more.

    Args:
        paths: the files.
        channels: that the model takes.
        named: the user named these files, so each is an image.

    Raises:
        InputError: a named file is not an image; or the model takes grey images only, and one has
            colours.
    """
    for path in paths if named or channels == 1 else ():
        try:
            with Image.open(path) as image:
                mode = image.mode
        except OSError as error:
            if named and isinstance(error, UnidentifiedImageError):
                raise InputError(f"{path} is not an image: leave it out") from None
            continue
        if channels == 1 and mode not in ("1", "L"):
            raise InputError(
                f"{path} is not a grey image (Pillow's mode {mode}), but the model was trained on "
                "images of one channel: convert it"
            )
