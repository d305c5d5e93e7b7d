"""Options that have no effect with the data, model or device that were chosen."""

from collections.abc import Mapping
from typing import Any

from common.errors import InputError


def refuse_unused(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError for an option that was given and has no effect.

    Args:
        values: of all options, by their names in Python.
        defaults: the recipe's; an option with its default value counts as not given.
    """
    for name, why in _unused(values).items():
        if name in values and values[name] != defaults[name]:
            raise InputError(f"--{name.replace('_', '-')} has no effect: {why}")


def _unused(values: Mapping[str, Any]) -> dict[str, str]:
    """Name of each option without effect, and why that is so or what to give."""
    data, model, found = values.get("data"), values.get("model"), {}
    if data in ("digits", "fake"):
        other = "give --data imagefolder for a folder of photos"
        found["data_path"] = f"--data {data} reads no folder: {other}, or leave it out"
    if data in ("digits", "fake", "packed") and not values.get("weights"):
        found["download"] = f"--data {data} needs no download: leave it out"
    photos = data == "imagefolder" and values["data_path"].name != "flower_photos"
    if photos and not values.get("weights"):
        found["download"] = (
            "it gets the flower photos, if --data-path ends in flower_photos, or the file of "
            "--weights: leave it out"
        )
    if data != "imagefolder":
        found["verify_images"] = "only --data imagefolder has image files: leave it out"
    if data != "packed":
        found["data_local"] = "only --data packed is copied: leave it out"
    if model == "convnet":
        for name in ("stem", "zero_init_residual"):
            found[name] = "only ResNets have it: give --model resnet18, or leave it out"
    if values.get("weights"):
        found["zero_init_residual"] = "--weights holds these weights: leave it out"
    if model == "toy":
        found["norm"] = "the toy has no normalisation: give --model resnet50, or leave it out"
    if values.get("lr_schedule") == "constant":
        found["lrf"] = "--lr-schedule constant keeps the rate: leave it out, or choose a cosine"
    if values.get("device") == "cpu":
        found["tf32"] = found["pin_memory"] = "it is for GPUs, and --device is cpu: leave it out"
    return found
