"""The recipe ddp_launch on the ranks of the pool."""

import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import nn

from common import run_status
from common.data.datasets import DataOptions
from common.errors import StopRequested
from common.launch.ranks import Ranks
from common.run import parts
from common.run.options import RunOptions
from common.training.ddp import ParallelOptions
from common.training.losses import LossOptions
from common.training.models import ModelOptions
from common.training.optimizer import OptimizerOptions
from recipes.ddp_launch.train import Config, train
from tests.helpers.commands import ROOT, Result
from tests.helpers.pool import Pool, call_main

DDP_LAUNCH = (ROOT / "recipes" / "ddp_launch" / "train.py").read_text()


def changed_recipe(changes: Mapping[str, str], file: Path | None = None) -> Any:
    """A copy of the recipe's module with changes, old text to new; as if it stood in `file`."""
    source = DDP_LAUNCH
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    recipe: Any = ModuleType("changed_recipe")
    recipe.__package__, recipe.deepcopy = "recipes.ddp_launch", deepcopy
    sys.modules["changed_recipe"] = recipe
    recipe.__file__ = str(file or "changed_recipe.py")
    exec(compile(source, recipe.__file__, "exec"), recipe.__dict__)
    return recipe


def run_changed(
    ranks: Ranks, folder: Path, changes: Mapping[str, str], arguments: Sequence[str]
) -> str:
    """A changed recipe on this rank; what its error says, empty without one."""
    recipe = changed_recipe(changes)
    given = [*arguments, "--output-dir", str(folder)]
    try:
        recipe.train(recipe.cli.parse("ddp_launch", recipe.Config, given)[1], ranks)
        run_status.refuse_unfinished()
    except Exception as error:  # the test looks at its words
        return f"{type(error).__name__}: {error}"
    return ""


def run_training(ranks: Ranks, folder: Path, options: dict[str, dict[str, Any]]) -> bool:
    """The recipe itself on this rank; True where it was asked to stop."""
    config = Config(
        run=RunOptions(output_dir=folder, **options.get("run", {})),
        data=DataOptions(**options.get("data", {})),
        model=ModelOptions(**options.get("model", {})),
        loss=LossOptions(**options.get("loss", {})),
        optimizer=OptimizerOptions(**options.get("optimizer", {})),
        parallel=ParallelOptions(**options.get("parallel", {})),
    )
    try:
        train(config, ranks)
    except StopRequested:
        return True
    return False


def training(pool: Pool, world_size: int, folder: Path, **options: dict[str, Any]) -> Result:
    pool.run(run_training, world_size, folder, options)
    return Result(0, "", "", folder)


def train_model(ranks: Ranks, folder: Path, kind: type[nn.Module], options: dict[str, Any]) -> None:
    """ddp_launch with a model of one's own, as one rank."""
    with patch.object(parts, "prepare_model", lambda *_, **__: kind()):
        run_training(ranks, folder, options)


def assert_refused(pool: Pool, says: str, *options: str | Path, name: str = "ddp_launch") -> None:
    """Status 2, one `error:` line and no traceback."""
    given = ["--nproc", "1"] if name == "ddp_launch" else []
    ((status, _, said),) = pool.run(call_main, 1, name, [*given, *map(str, options)])
    assert status == 2, f"status {status}\n{said}"
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert re.search(says, errors[0]), errors[0]
    assert "Traceback" not in said
