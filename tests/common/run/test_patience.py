"""`--patience N` ends a run after N epochs without a better one: where, by the metrics alone."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from common.weights import weights_sha256
from tests.helpers.pool import Pool, call_main
from tests.helpers.training import training

OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"epochs": 12, "global_batch_size": 240, "lr": 1.0},  # too high: it does not learn
    "parallel": {"virtual_ranks": 4},
}


def test_a_run_ends_where_it_has_not_improved_for_so_long(pool: Pool, tmp_path: Path) -> None:
    whole = training(pool, 2, tmp_path / "whole", **OPTIONS, run={"epoch_weights": True})
    accuracies = [line["val_accuracy"] for line in whole.metrics if "val_accuracy" in line]
    best, last = 0, 0
    for last, accuracy in enumerate(accuracies):
        best = last if accuracy > accuracies[best] else best
        if last - best == 3:
            break
    assert 0 < last < 11, f"the law needs a run that ends on the way: {accuracies}"
    weights = torch.load(tmp_path / f"whole/weights/epoch_{last:04d}.pt", weights_only=True)
    early = f"after epoch {last + 1} of 12: no improvement since epoch {best + 1}"
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        for steps in (5 * best + 8, None, None):  # interrupted, resumed, repeated
            optimizer = {**OPTIONS["optimizer"], "max_steps": steps}
            options = {**OPTIONS, "optimizer": optimizer, "run": {"patience": 3}}
            found = training(pool, ranks, folder, **options).summary
        assert found["weights_sha256"] == weights_sha256(weights)
        assert (found["epochs"], found["early"]) == (last + 1, early)
        status = json.loads((folder / "status.json").read_text())
        assert status == {"status": "finished", "early": early}


def test_the_command_says_why_it_ended_and_trains_no_more(pool: Pool, tmp_path: Path) -> None:
    options = (
        "--epochs 12 --global-batch-size 96 --lr 1 --patience 1 --nproc 1 --output-dir".split()
    )
    for line in ("finished early after", "already finished after step"):
        ((status, *_),) = pool.run(call_main, 1, "ddp_launch", [*options, str(tmp_path)])
        assert status == 0
        *_, log = (tmp_path / "logs/rank_0.log").read_text().partition(line)
        assert re.search("early after epoch .* of 12: no improvement since epoch", line + log)
    options += [str(tmp_path / "none"), "--best-by", "none"]
    ((status, _, told),) = pool.run(call_main, 1, "ddp_launch", options)
    assert status == 2
    assert "--patience needs a metric" in told
