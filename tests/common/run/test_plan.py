"""What a run will do is decided by one pure function: no test here starts anything."""

import math
import re
from typing import Any

import pytest
import torch

from common.errors import InputError
from common.run.plan import Plan, batch_size_of, make_plan
from common.training.optimizer import Default, OptimizerOptions


def plan(
    samples: int = 1437, ranks: int = 1, /, cuts: dict[str, Any] | None = None, **options: Any
) -> Plan:
    return make_plan(OptimizerOptions(**options), samples, ranks, **(cuts or {}))


def rates(found: Plan) -> list[float]:
    return [found.lr(step) for step in range(found.all_steps)]


def test_lr_is_not_multiplied_by_anything() -> None:
    for size in (8, 512):
        assert plan(lr=0.3, epochs=2, global_batch_size=size).lr(0) == 0.3


def test_cosine_goes_from_lr_to_lrf() -> None:
    found = rates(plan(70, lr=0.2, lrf=0.1, epochs=3, global_batch_size=10))
    assert found[0] == 0.2
    assert found[10] == pytest.approx((0.2 + 0.02) / 2)
    assert found[20] == pytest.approx(0.02)
    assert found == sorted(found, reverse=True)


def test_a_cosine_by_epoch_is_that_of_lambda_lr_stepped_after_each_epoch() -> None:
    by_epoch = plan(
        70, lr=0.2, lrf=0.1, epochs=5, lr_schedule="cosine-by-epoch", global_batch_size=10
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: (1 + math.cos(epoch * math.pi / 5)) / 2 * (1 - 0.1) + 0.1
    )
    for epoch in range(5):
        found = [by_epoch.lr(7 * epoch + step) for step in range(7)]
        assert found == pytest.approx(schedule.get_last_lr() * 7)
        optimizer.step()
        schedule.step()


def test_a_cosine_by_epoch_begins_after_the_warm_up() -> None:
    options: dict[str, Any] = {
        "lr": 1,
        "lrf": 0,
        "epochs": 6,
        "warmup_epochs": 2,
        "global_batch_size": 10,
    }
    found = rates(plan(100, lr_schedule="cosine-by-epoch", **options))
    assert found[19:30] == pytest.approx([1.0] * 11)
    assert found[30:40] == pytest.approx([(1 + math.cos(math.pi / 4)) / 2] * 10)


def test_a_constant_rate_stays() -> None:
    options: dict[str, Any] = {"lr": 0.2, "epochs": 3, "warmup_epochs": 1, "global_batch_size": 10}
    found = rates(plan(100, lr_schedule="constant", **options))
    assert found[:10] == pytest.approx([0.02 * (step + 1) for step in range(10)])
    assert set(found[10:]) == {0.2}


def test_linear_scaling_is_reached_by_warm_up() -> None:
    options: dict[str, Any] = {"lr": 0.1, "scale_lr": 256, "warmup_epochs": 2, "epochs": 10}
    found = rates(plan(10240, global_batch_size=1024, **options))
    assert max(found) == pytest.approx(0.4)
    assert found[:20] == pytest.approx([0.4 * (step + 1) / 20 for step in range(20)])
    assert max(found[20:]) == found[20] == pytest.approx(0.4)


def test_max_steps_leaves_the_schedule_as_it_is() -> None:
    whole, cut = plan(epochs=5), plan(epochs=5, max_steps=3)
    assert (whole.last_step, cut.last_step, cut.all_steps) == (70, 3, 70)
    assert rates(whole) == rates(cut)


def test_the_default_batch_can_be_shared_by_any_number_of_ranks() -> None:
    sizes = {n: plan(10**6, n).global_batch_size for n in range(1, 17)}
    assert all(size % n == 0 for n, size in sizes.items())
    assert all(2 * abs(size - 96) <= n for n, size in sizes.items()), "the nearest"
    assert batch_size_of(OptimizerOptions(), parts=200) == 200
    assert batch_size_of(OptimizerOptions(batch_size_per_rank=8), parts=3) == 24


def test_a_small_data_set_gets_ten_steps_per_epoch_from_the_defaults() -> None:
    for samples in range(125, 3000, 7):
        for ranks in (1, 2, 3, 4):
            found = plan(samples, ranks)
            assert found.steps_per_epoch >= 9, "10 before the batch is shared by three"
            assert 10 * found.left_out <= 1.2 * samples, "few are left out of an epoch"
            assert found.peak_lr / 0.1 == pytest.approx(found.global_batch_size / 96, rel=0.05)
    assert plan(9).global_batch_size == 6, "fewer samples than the least batch"


@pytest.mark.parametrize(
    ("samples", "ranks", "options", "lr", "sizes"),
    [
        (1437, 2, {}, 0.1, (48, 48)),  # digits, as recorded
        (160, 2, {}, 0.0125, (6, 6)),
        (160, 2, {"lr": 0.1}, 0.1, (6, 6)),  # what is given is not fitted to the data
        (160, 2, {"global_batch_size": 96}, 0.1, (48, 48)),
        (160, 2, {"scale_lr": 96}, 0.0125, (6, 6)),  # scaled by the rule, not twice
        (160, 3, {"batch_size_per_rank": 8}, 0.1, (8, 8, 8)),
    ],
)
def test_the_rate_and_the_shares(
    samples: int, ranks: int, options: dict[str, Any], lr: float, sizes: tuple[int, ...]
) -> None:
    found = plan(samples, ranks, **options)
    assert found.sizes == sizes
    assert found.peak_lr == pytest.approx(lr)
    assert found.loss_divisor == sizes[0]


@pytest.mark.parametrize(
    ("ranks", "cuts", "sizes", "at_once", "divisor"),
    [
        (2, {"micro_batches": 4}, (48, 48), 12, 48),
        (2, {"virtual_ranks": 8}, (48, 48), 48, 48),
        (3, {"virtual_ranks": 8}, (24, 36, 36), 32, 24),  # 2, 3 and 3 shards of 12
        (5, {"virtual_ranks": 8}, (12, 24, 12, 24, 24), 19, 12),
        (1, {"devices": 5}, (95,), 95, 95),
        (1, {"devices": 5, "uneven": True}, (95,), 95, 95),
    ],
)
def test_how_each_batch_is_cut(
    ranks: int, cuts: dict[str, Any], sizes: tuple[int, ...], at_once: int, divisor: int
) -> None:
    found = plan(1437, ranks, cuts=cuts)
    assert (found.sizes, found.micro_batch_size, found.loss_divisor) == (sizes, at_once, divisor)
    assert found.even == (len({*sizes}) == 1)


SAID: dict[tuple[int, int], tuple[dict[str, Any], str]] = {
    (1437, 2): (
        {},
        "batch size 96 (default 96), steps per epoch: 14, learning rate 0.1 (default 0.1)",
    ),
    (160, 2): (
        {},
        "batch size 12 (default 96, halved to 12 for more steps per epoch), steps per epoch: 13, "
        "learning rate 0.0125 (default 0.1 x 12 / 96)",
    ),
    (161, 2): (
        {"global_batch_size": 96, "lr": 0.3},
        "batch size 96 (--global-batch-size), steps per epoch: 1, learning rate 0.3 (--lr 0.3)",
    ),
    (1000, 2): (
        {"batch_size_per_rank": 8, "scale_lr": 32, "warmup_epochs": 1},
        "batch size 16 (--batch-size-per-rank 8 x 2), steps per epoch: 62, "
        "learning rate 0.05 (default 0.1 x 16 / 32)",
    ),
}


def test_the_run_says_where_batch_and_rate_come_from(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for (samples, ranks), (options, said) in SAID.items():
        caplog.clear()
        plan(samples, ranks, **options)
        assert caplog.messages[0] == said


@pytest.mark.parametrize(
    ("samples", "ranks", "says"),
    [
        (16, 1, "with --global-batch-size 1 there would be 16"),  # the default: 12, one step
        (50, 2, "with --global-batch-size 4 there would be 12"),
        (16, 4, "with --global-batch-size 4 there would be 4"),
        (9, 6, "the data set has 9 samples only"),
        (120, 1, None),
    ],
)
def test_a_run_of_few_steps_per_epoch_says_what_would_give_more(
    caplog: pytest.LogCaptureFixture, samples: int, ranks: int, says: str | None
) -> None:
    plan(samples, ranks)
    assert caplog.messages == ([f"few steps per epoch: {says}"] if says else [])


VIRTUAL = "virtual_ranks"
REFUSED: list[tuple[int, int, dict[str, Any], dict[str, Any], str]] = [
    (1437, 2, {}, {"global_batch_size": 1437}, "by 2 processes: give 1436"),
    (1437, 3, {}, {"global_batch_size": 1436}, "by 3 processes: give 1434 or 1437"),
    (1437, 2, {}, {"global_batch_size": 1}, "by 2 processes: give 2"),
    (1000, 3, {}, {"global_batch_size": 97}, "by 3 processes: give 96 or 99"),
    (1437, 2, {}, {"global_batch_size": 2000}, "1437 samples of .*: give .*size 1436 or less"),
    (10, 1, {}, {"global_batch_size": 12}, "more than the 10 samples of .* 10 or less"),
    (10, 2, {}, {"batch_size_per_rank": 9}, "size 18 is more than the 10 .* 10 or less"),
    (3, 4, {}, {}, "3 samples of .* too few for 4 processes: .*: start fewer processes"),
    (1437, 2, {"micro_batches": 5}, {"global_batch_size": 96}, "batch of 48: give .* 90 or 100"),
    (1437, 2, {"micro_batches": 5}, {"global_batch_size": 97}, "by 2 processes: give 90 or 100"),
    (1437, 2, {"micro_batches": 5000}, {}, "too few for --accumulate 5000 .* 718 or less"),
    (
        1437,
        2,
        {"micro_batches": 5, "cut_by": "--micro-batches"},
        {"global_batch_size": 96},
        "--micro-batches 5 does not divide a rank's batch of 48: give .* 90 or 100",
    ),
    (1437, 8, {VIRTUAL: 4}, {}, "--virtual-ranks 4 is less than 8 processes: start 4 or fewer"),
    (1437, 3, {VIRTUAL: 4}, {"batch_size_per_rank": 8}, "unequal shares: give --global-batch-size"),
    (1437, 3, {VIRTUAL: 8}, {"global_batch_size": 97}, "global batch of 97: 96 or 104 samples"),
    (1437, 2, {VIRTUAL: 8}, {"global_batch_size": 97}, "global batch of 97: 96 or 104 samples"),
    (5, 1, {VIRTUAL: 8}, {}, "5 samples .* too few for --virtual-ranks 8: give a smaller number"),
    (1437, 1, {"devices": 2}, {"global_batch_size": 97}, "by 2 devices: give 96 or 98"),
    (1437, 1, {"devices": 4, "uneven": True}, {"global_batch_size": 3}, "than 4 devices: give 4"),
    (
        10**6,
        2,
        {},
        {"scale_lr": 256, "batch_size_per_rank": 2500},
        "--scale-lr for a global batch of 5000 needs --warmup-epochs",
    ),
]


@pytest.mark.parametrize(("samples", "ranks", "cuts", "options", "says"), REFUSED)
def test_what_cannot_be_is_refused_and_no_advice_is_refused_next(
    samples: int, ranks: int, cuts: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=rf"{says}") as refused:
        plan(samples, ranks, cuts=cuts, **options)
    said = str(refused.value)
    advice = re.search(
        r"(?:give (?:--global-batch-size )?|: )([\d or]*\d)(?: or less| samples|$)", said
    )
    for advised in re.findall(r"\d+", advice[1] if advice else ""):
        if "--accumulate" in said and "or less" in said:
            plan(samples, ranks, cuts={**cuts, "micro_batches": int(advised)}, **options)
        else:
            plan(samples, ranks, cuts=cuts, global_batch_size=int(advised))


def test_a_batch_of_5000_with_warm_up_is_scaled() -> None:
    found = plan(10**5, scale_lr=256, global_batch_size=5000, warmup_epochs=1)
    assert found.peak_lr == pytest.approx(0.1 * 5000 / 256)
    assert isinstance(OptimizerOptions().lr, Default)
