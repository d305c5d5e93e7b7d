"""The learning rate is used as given, and its schedule is a pure function of the step."""

import math

import pytest

from common.errors import InputError
from common.training.optimizer import OptimizerOptions


def test_lr_is_not_multiplied_by_anything() -> None:
    options = OptimizerOptions(lr=0.3, epochs=2)
    assert [options.learning_rate(0, 10, batch) for batch in (8, 512)] == [0.3, 0.3]


def test_cosine_goes_from_lr_to_lrf() -> None:
    options = OptimizerOptions(lr=0.2, lrf=0.1, epochs=3)
    rates = [options.learning_rate(step, 7, 96) for step in range(21)]
    assert rates[0] == 0.2
    assert rates[10] == pytest.approx((0.2 + 0.02) / 2)
    assert rates[20] == pytest.approx(0.02)
    assert rates == sorted(rates, reverse=True)


def test_linear_scaling_is_reached_by_warm_up() -> None:
    options = OptimizerOptions(lr=0.1, scale_lr=256, warmup_epochs=2, epochs=10)
    rates = [options.learning_rate(step, 10, 1024) for step in range(100)]
    assert max(rates) == pytest.approx(0.4)
    assert rates[:20] == pytest.approx([0.4 * (step + 1) / 20 for step in range(20)])
    assert max(rates[20:]) == rates[20] == pytest.approx(0.4)


def test_max_steps_leaves_the_schedule_as_it_is() -> None:
    whole, cut = OptimizerOptions(epochs=5), OptimizerOptions(epochs=5, max_steps=3)
    assert [whole.learning_rate(s, 9, 96) for s in range(3)] == [
        cut.learning_rate(s, 9, 96) for s in range(3)
    ]


def test_two_ways_to_say_the_batch() -> None:
    assert OptimizerOptions(batch_size_per_rank=8).total_batch_size(3) == 24
    assert OptimizerOptions(global_batch_size=24).total_batch_size(3) == 24


def test_the_default_batch_can_be_shared_by_any_number_of_ranks() -> None:
    sizes = {n: OptimizerOptions().total_batch_size(n) for n in range(1, 17)}
    assert all(size % n == 0 for n, size in sizes.items())
    assert all(2 * abs(size - 96) <= n for n, size in sizes.items()), "the nearest"
    assert OptimizerOptions().total_batch_size(200) == 200
    assert OptimizerOptions(global_batch_size=96).total_batch_size(5) == 96, "refused, not changed"


def test_linear_scaling_without_warm_up_is_for_batches_below_5000() -> None:
    assert OptimizerOptions(scale_lr=256).total_batch_size(1) == 96
    with pytest.raises(InputError, match="needs --warmup-epochs"):
        OptimizerOptions(scale_lr=256, batch_size_per_rank=2500).total_batch_size(2)
    options = OptimizerOptions(scale_lr=256, global_batch_size=5000, warmup_epochs=1)
    assert options.total_batch_size(1) == 5000


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
    ],
)
def test_combinations_that_mean_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        OptimizerOptions(**wrong)  # type: ignore[arg-type]
