"""Laws of tune_loader."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.loaders import make_loader
from common.data.stream import Key, Samples
from common.data.workers import done, recommend
from common.launch.capacity import usable_cores
from common.throughput import samples_per_s
from recipes.tune_loader.streams import make_item_loader, make_stream_loader
from tests.helpers.gradients import CPU
from tests.helpers.images import flowers
from tests.helpers.pool import Pool, call_main
from tests.helpers.run_folders import summary


@pytest.mark.slow
def test_auto_measures_once_and_changes_no_bit(pool: Pool, tmp_path: Path) -> None:
    def run(folder: str, *more: str) -> dict[str, Any]:
        arguments = ["--nproc", "1", "--epochs", "2", *more, "--output-dir", str(tmp_path / folder)]
        ((status, _, said),) = pool.run(call_main, 1, "ddp_launch", arguments)
        assert status == 0, said
        return summary(tmp_path / folder)

    plain = run("plain")
    run("auto", "--num-workers", "auto", "--max-steps", "3")
    answer = json.loads((tmp_path / "auto" / "loader.json").read_text())
    assert 0 <= answer["num_workers"] <= usable_cores()
    assert all(speed > 0 for speed in answer["samples_per_s_a_rank"].values())
    changed = {**answer, "num_workers": 1}
    (tmp_path / "auto" / "loader.json").write_text(json.dumps(changed))
    auto = run("auto", "--num-workers", "auto")
    assert auto["weights_sha256"] == plain["weights_sha256"]
    kept = json.loads((tmp_path / "auto" / "loader.json").read_text())
    assert kept == changed, "a resumed run keeps the answer"


def test_the_recommendation_is_the_smallest_that_nothing_beats() -> None:
    assert recommend({0: 100.0, 1: 90.0, 2: 99.0})[0] == 0
    assert recommend({0: 100.0, 1: 103.0, 2: 104.0})[0] == 0, "within noise"
    assert recommend({0: 100.0, 1: 180.0, 2: 300.0, 3: 310.0, 4: 250.0})[0] == 2
    number, why = recommend({0: 100.0, 1: 80.0, 2: 160.0})
    assert (number, why) == (2, "the fastest, 1.6 times loading in the training process")
    assert not done({0: 100.0, 1: 90.0})
    assert done({0: 100.0, 1: 90.0, 2: 99.0})
    assert not done({0: 100.0, 1: 90.0, 2: 150.0})


class Slow(Samples):
    """A sample takes two milliseconds of waiting, as for a disk."""

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        time.sleep(0.002 * len(keys))
        return super().__getitems__(keys)


def test_what_is_measured_is_loading_and_not_what_was_loaded_before() -> None:
    """200 samples of 2 ms by two processes take 0.2 s: none may be ready when the clock starts."""
    samples = Slow([(torch.zeros(1), 0)], [0] * 200, 0)
    epoch = [[(0, index) for index in range(start, start + 10)] for start in range(0, 200, 10)]
    for workers, ideal in ((0, 500), (2, 1000)):
        for make in (make_loader, make_stream_loader, make_item_loader):
            speed = samples_per_s(partial(make, samples, epoch, num_workers=workers), CPU)
            assert 0 < speed <= ideal


@pytest.mark.parametrize("style", ["map", "stream", "items"])
def test_tune_loader_measures_every_style(pool: Pool, tmp_path: Path, style: str) -> None:
    options = "--global-batch-size 32 --samples 64 --max-workers 1 --rounds 2 --device cpu --style"
    arguments = [*options.split(), style, "--output-dir", str(tmp_path)]
    ((status, _, said),) = pool.run(call_main, 1, "tune_loader", arguments)
    assert status == 0, said
    found = json.loads((tmp_path / "loader.json").read_text())
    assert (found["style"], found["samples"], found["pin_memory"]) == (style, 64, False)
    speeds = found["samples_per_s"]["pageable"]
    assert {number: len(rounds) for number, rounds in speeds.items()} == {"0": 2, "1": 2}
    assert all(speed > 0 for rounds in speeds.values() for speed in rounds)


def test_the_default_batch_fits_a_small_data_set(pool: Pool, tmp_path: Path) -> None:
    flowers(tmp_path / "photos", 30)
    options = f"--data imagefolder --data-path {tmp_path / 'photos'} --image-size 32 --samples 24"
    less = ["--max-workers", "0", "--rounds", "1", "--output-dir", str(tmp_path / "out")]
    ((status, _, said),) = pool.run(call_main, 1, "tune_loader", [*options.split(), *less])
    assert status == 0, said
    assert json.loads((tmp_path / "out" / "loader.json").read_text())["global_batch_size"] == 12
