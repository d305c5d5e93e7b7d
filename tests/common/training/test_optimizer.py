"""The learning rate is used as given, and its schedule is a pure function of the step."""

import math

import pytest
import torch

from common.errors import InputError
from common.training.evaluation import best_metric, explosion
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


def test_a_cosine_by_epoch_is_that_of_lambda_lr_stepped_after_each_epoch() -> None:
    options = OptimizerOptions(lr=0.2, lrf=0.1, epochs=5, lr_schedule="cosine-by-epoch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: (1 + math.cos(epoch * math.pi / 5)) / 2 * (1 - 0.1) + 0.1
    )
    for epoch in range(5):
        rates = [options.learning_rate(7 * epoch + step, 7, 96) for step in range(7)]
        assert rates == pytest.approx(schedule.get_last_lr() * 7)
        optimizer.step()
        schedule.step()


def test_a_cosine_by_epoch_begins_after_the_warm_up() -> None:
    options = OptimizerOptions(
        lr=1, lrf=0, epochs=6, warmup_epochs=2, lr_schedule="cosine-by-epoch"
    )
    rates = [options.learning_rate(step, 10, 96) for step in range(60)]
    assert rates[19:30] == pytest.approx([1.0] * 11)
    assert rates[30:40] == pytest.approx([(1 + math.cos(math.pi / 4)) / 2] * 10)


def test_a_constant_rate_stays() -> None:
    options = OptimizerOptions(lr=0.2, epochs=3, warmup_epochs=1, lr_schedule="constant")
    rates = [options.learning_rate(step, 10, 96) for step in range(30)]
    assert rates[:10] == pytest.approx([0.02 * (step + 1) for step in range(10)])
    assert set(rates[10:]) == {0.2}


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


def test_a_small_data_set_gets_ten_steps_per_epoch_from_the_defaults() -> None:
    for samples in range(125, 3000, 7):
        for world_size in (1, 2, 3, 4):
            options, size = OptimizerOptions().fit(samples, world_size)
            assert size % world_size == 0
            assert samples // size >= 9, "10 before the batch is shared by three"
            assert 10 * (samples % size) <= 1.2 * samples, "few are left out of an epoch"
            assert options.lr / 0.1 == pytest.approx(size / 96, rel=0.05)
    assert OptimizerOptions().fit(1437, 2) == (OptimizerOptions(), 96), "digits, as recorded"
    assert OptimizerOptions().fit(9, 1)[1] == 6, "fewer samples than the least batch"


def test_what_the_user_gave_is_not_fitted_to_the_data() -> None:
    given = OptimizerOptions(lr=0.1)
    options, size = given.fit(160, 2)
    assert (options.lr, size) == (0.1, 12)
    options, size = OptimizerOptions(global_batch_size=96).fit(160, 2)
    assert (options.lr, size) == (0.1, 96)
    assert OptimizerOptions(scale_lr=96).fit(160, 2)[0].lr == 0.1, "scaled by the rule, not twice"


def test_the_run_says_where_batch_and_rate_come_from(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    OptimizerOptions().fit(1437, 2)
    OptimizerOptions().fit(160, 2)
    OptimizerOptions(global_batch_size=96, lr=0.3).fit(160, 2)
    OptimizerOptions(batch_size_per_rank=8, scale_lr=32).fit(1000, 2)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == (
        "batch size 96 (default 96), steps per epoch: 14, learning rate 0.1 (default 0.1)"
    )
    assert said[1] == (
        "batch size 12 (default 96, halved to 12 for more steps per epoch), steps per epoch: 13, "
        "learning rate 0.0125 (default 0.1 x 12 / 96)"
    )
    assert said[2] == (
        "batch size 96 (--global-batch-size), steps per epoch: 1, learning rate 0.3 (--lr 0.3)"
    )
    assert said[3] == "few steps per epoch: with --global-batch-size 12 there would be 13"
    assert said[5] == (
        "batch size 16 (--batch-size-per-rank 8 x 2), steps per epoch: 62, "
        "learning rate 0.05 (default 0.1 x 16 / 32)"
    )


@pytest.mark.parametrize(
    ("samples", "world_size", "says"),
    [
        (16, 1, "with --global-batch-size 1 there would be 16"),  # the default: 12, one step
        (50, 2, "with --global-batch-size 4 there would be 12"),
        (16, 4, "with --global-batch-size 4 there would be 4"),
        (9, 6, "the data set has 9 samples only"),
        (120, 1, None),
    ],
)
def test_a_run_of_few_steps_per_epoch_says_what_would_give_more(
    caplog: pytest.LogCaptureFixture, samples: int, world_size: int, says: str | None
) -> None:
    OptimizerOptions().fit(samples, world_size)
    assert caplog.messages == ([f"few steps per epoch: {says}"] if says else [])


def test_more_parts_than_samples_are_not_blamed_on_the_batch() -> None:
    says = r"into 5000 parts \(--accumulate, .* needs 10000 samples, and there are 1437"
    with pytest.raises(InputError, match=says):
        OptimizerOptions().fit(1437, 2, 5000)


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
    for name, better, worse in (("val_error_px", 0.6, 1.2), ("val_loss", 1, 2), ("val_f1", 2, 1)):
        assert best_metric(name, {name: better}, {name: worse}) == name
        assert best_metric(name, {name: worse}, {name: better}) is None
    assert best_metric(None, {"val_loss": 1.0, "val_error": 1.0}, None) == "val_loss"
    assert best_metric(None, {"val_error": 1.0}, None) is None, "nobody asked for a best epoch"


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
        {"warmup_epochs": 1e308},
        {"warmup_epochs": math.inf},
    ],
)
def test_combinations_that_mean_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        OptimizerOptions(**wrong)  # type: ignore[arg-type]
