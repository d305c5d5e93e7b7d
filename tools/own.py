"""A finished run of a recipe with data or a model of its own (docs/bring-your-own.md, Use it).

The recipe's train.py makes its data and its model with functions of these names, and so does
`evaluate`:

    own_data(config) -> Data            or an object with data and score; without it, the data are
                                        those of --data
    own_model(config) -> nn.Module      without it, the model is that of --model
    score(model, batch)                 without it, the metrics are those of classes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from common.data.datasets import load_data
from common.data.stream import Samples
from common.errors import InputError
from common.group.collectives import agreed
from common.launch.ranks import Ranks
from common.seeds import mixed_precision
from common.training.evaluation import Scores, score_classes
from common.training.models import build_model, move
from recipes.__main__ import recipes
from tools.recorded import options_of
from tools.trained import Trained, load_all, refuse_altered


def recipe_of(config: dict[str, Any]) -> Any:
    """The train module of a recipe with own data or an own model; None for any other recipe."""
    if config["recipe"] not in recipes():  # it is gone, but a classifier of images needs none
        return None
    recipe = import_module(f"recipes.{config['recipe']}.train")
    return recipe if hasattr(recipe, "own_data") or hasattr(recipe, "own_model") else None


def config_of(recipe: Any, run: Trained) -> Any:
    """The recipe's Config with the values of the run's config.json.

    Raises:
        InputError: an option is missing or has a wrong value.
    """
    values = run.config
    if values.get("batch_size_per_rank"):  # the other one was computed from it
        values = values | {"global_batch_size": None}
    kinds = get_type_hints(recipe.Config).items()
    return recipe.Config(**{name: options_of(run.folder, values, kind) for name, kind in kinds})


@dataclass(frozen=True)
class Parts:
    """What is evaluated, on what."""

    val: Samples
    mean: Sequence[float]
    std: Sequence[float]
    """Of the channels of images that are bytes, as in `Data`."""
    model: nn.Module
    dtype: torch.dtype
    score: Callable[[nn.Module, Any], Scores]
    classes: Sequence[str] = ()
    """Their names, where the data say them."""


def load_own(
    recipe: Any, run: Trained, weights: Path | None, ranks: Ranks, device: torch.device
) -> Parts:
    """Make the data and the model as the recipe does, with the run's weights. Calls collectives.

    Args:
        recipe: its train module.
        run: the recipe's.
        weights: a file with a state_dict. None: the run's model.pt.
        ranks: this rank.
        device: where the model goes.

    Raises:
        InputError: the data are not the run's, or the weights do not fit the model.
    """
    config = config_of(recipe, run)
    if not hasattr(recipe, "own_data"):
        made = data = load_data(config.data, config.run.seed, ranks)
    with agreed():
        if hasattr(recipe, "own_data"):
            made = recipe.own_data(config)
            data = getattr(made, "data", made)  # a score may need the data: Text of fsdp
        if not run.trained_on(data):
            raise InputError(
                f"the data of {recipe.__name__} are not those that {run.folder} was trained on, or "
                "have changed since: restore them"
            )
        if hasattr(recipe, "own_model"):
            model = recipe.own_model(config)
        else:
            model = build_model(config.model, *data.sizes_for_model)
        dtype, _, _ = mixed_precision(run.config["precision"], device)
        move(model, torch.device("cpu"), dtype)  # before the weights, which may be of fp64
        file = weights or run.folder / "model.pt"
        refuse_altered(file, run.folder, run.summary)
        load_all(model, file, recipe.__name__, f"{run.folder}/config.json")
        if run.config.get("channels_last"):  # it decides the last bits
            model.to(memory_format=torch.channels_last)
    score = getattr(made, "score", getattr(recipe, "score", score_classes))
    model.to(device).eval()
    return Parts(data.val, data.mean, data.std, model, dtype, score, data.class_names)
