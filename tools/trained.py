"""A finished run's model, as the run's folder describes it (`predict`, `evaluate`, `sample`)."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from common.data.datasets import Data
from common.errors import InputError
from common.identity import CONTENTS
from common.parse import given_path
from common.reading import refuse_closed
from common.run.folder import preprocessing_sha256
from common.run.options import RunOptions
from common.seeds import mixed_precision
from common.training.models import ModelOptions, build_model, load_matching, read_weights
from common.weights import weights_sha256
from tools.recorded import options_of, read_record, read_summary, reading

G = TypeVar("G")


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    config: dict[str, Any]
    """The run's options, resolved."""
    preprocessing: dict[str, Any]
    """Of images; empty for a recipe with own data or an own model."""
    summary: dict[str, Any]
    manifest: dict[str, Any]
    """Only the data's fingerprint and the seed in it are checked."""

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return int(self.preprocessing["channels"])

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by index."""
        return list(self.preprocessing["classes"])

    @property
    def own_weights(self) -> Path:
        """The file of its weights."""
        return self.folder / "model.pt"

    def chosen(self, given: argparse.Namespace) -> Path | None:
        """The file of weights that the options of `add_weights` name; None: model.pt.

        Raises:
            InputError: --best, and the run kept no best epoch.
        """
        weights: Path | None = given.weights
        if given.best and not self.summary.get("best"):
            raise InputError(
                f"{self.folder} has no best.pt: no epoch was evaluated, or --best-by was none: "
                "leave --best out"
            )
        return self.folder / "best.pt" if given.best else weights

    def trained_on(self, data: Data, *, contents: bool = True) -> bool:
        """Whether these are the run's data, by their fingerprint.

        contents: compare the photos' bytes, too, not only their names and sizes.
        """
        both = (str(self.manifest["data_fingerprint"]), data.fingerprint)
        recorded, found = (each if contents else each.split(CONTENTS)[0] for each in both)
        return recorded == found

    def prepared(self, image: Tensor) -> Tensor:
        """The bytes (channels, side, side) that the model sees of an RGB image (3, ...)."""
        image = image[: self.channels]  # all three of a grey image are equal
        resized = functional.resize(image, self.preprocessing["resize"])
        cropped: Tensor = functional.center_crop(resized, self.preprocessing["crop"])
        return cropped

    def options(self, group: type[G], **other: Any) -> G:
        """An option group as the run had it, with `other` values."""
        return options_of(self.folder, self.config, group, **other)

    def model(self, weights: Path | None, device: torch.device) -> tuple[nn.Module, torch.dtype]:
        """The model in eval mode, and the dtype of its images.

        Args:
            weights: a file with a state_dict. None: the run's model.pt.
            device: where the model goes.

        Raises:
            InputError: the file does not fit the model, or is not what the run wrote.
        """
        # The run began with other weights, maybe; their file may be gone.
        options, side = self.options(ModelOptions, weights=None), self.preprocessing["crop"]
        dtype, _, _ = mixed_precision(self.options(RunOptions).precision, device)
        model = build_model(options, self.channels, len(self.classes), side)
        model.to(dtype)  # before the weights, which may be of fp64
        file = weights or self.own_weights
        refuse_altered(file, self.folder, self.summary)
        sizes = "(and channels and classes in preprocessing.json)"
        load_all(model, file, options.model, f"{self.folder}/config.json {sizes}")
        if options.channels_last:  # it decides the last bits
            model.to(memory_format=torch.channels_last)
        return model.to(device).eval(), dtype


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add --weights and --best, for `Trained.chosen`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--weights",
        type=given_path,
        help="another state_dict of the same model; default: RUN/model.pt",
    )
    which.add_argument(
        "--best", action="store_true", help="RUN/best.pt, of the best epoch, not RUN/model.pt"
    )


def read(folder: Path, *, own: bool = False) -> Trained:
    """Read the folder of a finished run on images, or of a recipe with `own` data or model.

    Raises:
        InputError: it is no such folder; says which file is missing or damaged.
    """
    config = read_config(folder)
    if not own and config.get("model") not in get_args(get_type_hints(ModelOptions)["model"]):
        raise InputError(
            f"{folder} is a run of {config['recipe']} with model {config.get('model')}, and not of "
            "an image classifier that can be rebuilt: give a run of ddp_launch, ddp_spawn, "
            "dp_resnet50, or model_parallel_toy --model resnet50; evaluate also takes fsdp and "
            "recipes with an own_model (docs/bring-your-own.md), and sample takes fsdp"
        )
    refuse_unfinished(folder)
    manifest = read_record(folder / "manifest.json", data_fingerprint=str, seed=int)
    if config.get("seed") != manifest["seed"]:  # it splits the data
        raise InputError(
            f'{folder}/config.json: "seed" is {config.get("seed")}, but {manifest["seed"]} in '
            "manifest.json: restore the file, or train again"
        )
    summary, path = read_summary(folder), folder / "preprocessing.json"
    if own:
        return Trained(folder, config, {}, summary, manifest)
    seen, names = read_record(path, classes=list), folder / "class_indices.json"
    if preprocessing_sha256(seen) != summary.get("preprocessing_sha256"):
        raise InputError(
            f"{path} is not what the run wrote (preprocessing_sha256 in summary.json): restore it"
        )
    with reading(path):  # a user may rename classes
        if len(set(seen["classes"])) < len(seen["classes"]):
            raise ValueError("classes with the same name")
        by_index = {str(index): name for index, name in enumerate(seen["classes"])}
        if names.exists() and read_record(names) != by_index:
            raise ValueError(f"other classes than in {names.name}")
    with reading(folder / "manifest.json"):
        trained_as = {str(name): place for place, name in enumerate(manifest.get("classes", []))}
    for place, name in enumerate(seen["classes"]):
        if trained_as.get(name, place) != place:
            raise InputError(
                f'{path}: "classes" has {name} as class {place}, which was class '
                f"{trained_as[name]} in the training (classes in manifest.json): give the classes "
                "new names, or restore their order"
            )
    return Trained(folder, config, seen, summary, manifest)


def read_config(folder: Path) -> dict[str, Any]:
    """The options of a run, resolved.

    Raises:
        InputError: it is no folder of a run, or the file is damaged or may not be read.
    """
    refuse_closed("the file", folder / "config.json")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not the folder of a run: it holds no config.json")
    if "recipe" not in read_record(folder / "config.json"):
        raise InputError(
            f"{folder} is not the folder of a training: its config.json names no recipe, like "
            "those of check_network and tune_loader"
        )
    return read_record(folder / "config.json", recipe=str)


def refuse_unfinished(folder: Path) -> None:
    """Raise InputError if the run has not finished."""
    if not (folder / "summary.json").is_file():
        raise InputError(
            f"the run in {folder} has not finished: run its command again with --output-dir "
            f"{folder} to resume it"
        )


def refuse_altered(weights: Path, folder: Path, summary: dict[str, Any]) -> None:
    """Raise InputError if `weights` is the run's own model.pt or best.pt, but not as it wrote it.

    A file that may not be read is refused, too: nothing is known of it.

    Args:
        weights: the file.
        folder: of the run.
        summary: of the run.
    """
    again = f"run its command again with --output-dir {folder}, which writes the file again"
    for name, of in (("model.pt", summary), ("best.pt", summary.get("best"))):
        path = folder / name
        if not of or weights.resolve() != path.resolve():
            continue
        if not path.exists():
            raise InputError(f"{path} is missing: restore it, or {again}")
        refuse_closed("the file", path)
        try:
            found = weights_sha256(read_weights(path))
        except (InputError, RuntimeError):  # no file of weights; a tensor without bytes
            found = ""
        if found != of["weights_sha256"]:
            raise InputError(
                f"{path} is not what the run wrote (weights_sha256 in summary.json): restore it, "
                f"or move it away and {again}"
            )


def load_all(model: nn.Module, weights: Path, name: str, said_by: str) -> None:
    """Load every entry of the model `name`, whose sizes are `said_by` a file.

    Raises:
        InputError: the file does not fit the model.
    """
    _, left_out = load_matching(model, weights)
    if left_out:
        raise InputError(
            f"{weights} does not fit {name} as in {said_by}: {len(left_out)} entries differ, the "
            f"first is {left_out[0]}. A recipe with a model of its own needs an own_model that "
            "builds it (docs/bring-your-own.md)"
        )


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
        except Exception as error:  # Pillow's readers raise many types
            if named and isinstance(error, UnidentifiedImageError):
                raise InputError(f"{path} is not an image: leave it out") from None
            continue
        if channels == 1 and mode not in ("1", "L"):
            raise InputError(
                f"{path} is not a grey image (Pillow's mode {mode}), but the model was trained on "
                "images of one channel: convert it"
            )
