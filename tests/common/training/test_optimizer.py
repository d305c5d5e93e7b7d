"""Options that mean nothing are refused; a loss that explodes and the best epoch are named."""

import math
from unittest.mock import Mock

import pytest

from common.run.best import BestEpoch
from common.run.options import RunOptions
from common.training.evaluation import explosion
from common.training.optimizer import OptimizerOptions


@pytest.mark.parametrize(
    ("classes", "train_losses", "names"),
    [
        (5, [1.77, 3.46], [False, True]),  # seen: ResNet-18 on 160 photos, learning rate 0.1
        (5, [10.4, 4.3, 3.7], [True, False, False]),
        (5, [2.08, 2.42, 2.26], [False, False, False]),  # learns
        (10, [3.1, 2.7, 8.9], [False, False, True]),
        (0, [0.5, 0.1, 0.9], [False, False, False]),
        (0, [0.5, 0.1, 1.9], [False, False, True]),
        (0, [-4.5, -4.0, 3.0], [False, False, False]),  # a likelihood: its zero means nothing
    ],
)
def test_a_loss_that_explodes_is_named(
    classes: int, train_losses: list[float], names: list[bool]
) -> None:
    before: dict[str, float] = {}
    for loss, named in zip(train_losses, names, strict=True):
        found = {"train_loss": loss, "val_loss": 10 * loss}
        assert bool(explosion(found, before, classes)) == named, loss
        before = found


def test_a_validation_loss_that_explodes_first_is_named() -> None:
    """As with BatchNorm and few steps per epoch: seen with 200 photos of ten classes."""
    losses = [2.89, 4.33, 5.14, 13.18, 50.79, 51.0]
    named = [
        bool(explosion({"train_loss": 1.0, "val_loss": loss}, {"train_loss": 1.1, **before}, 10))
        for loss, before in zip(losses[1:], [{"val_loss": loss} for loss in losses], strict=False)
    ]
    assert named == [False, False, True, True, False]
    assert not explosion({"train_loss": 2.3, "val_loss": 1e6}, {}, 10), "nothing to compare with"


def test_an_explosion_is_named_without_a_validation_loss() -> None:
    assert "train_loss 1 -> 20" in explosion({"train_loss": 20.0}, {"train_loss": 1.0}, 0)


def test_the_lowest_error_is_the_best() -> None:
    def improves(by: str | None, found: dict[str, float], before: dict[str, float]) -> str | None:
        state, run = Mock(best=before or None), Mock(options=RunOptions(best_by=by))
        return BestEpoch(run, state).improves(found)

    for name, better, worse in (("val_error_px", 0.6, 1.2), ("val_loss", 1, 2), ("val_f1", 2, 1)):
        assert improves(name, {name: better}, {name: worse}) == name
        assert improves(name, {name: worse}, {name: better}) is None
    assert improves(None, {"val_loss": 1.0, "val_error": 1.0}, {}) == "val_loss"
    assert improves(None, {"val_error": 1.0}, {}) is None, "nobody asked for a best epoch"


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_batch_size": 8, "batch_size_per_rank": 4},
        {"lr": 0.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"epochs": 0},
        {"max_steps": 0},
        {"lrf": 1.5},
        {"momentum": math.nan},
        {"warmup_epochs": -1.0},
        {"warmup_epochs": 1e308},
        {"warmup_epochs": math.inf},
    ],
)
def test_combinations_that_mean_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        OptimizerOptions(**wrong)  # type: ignore[arg-type]
