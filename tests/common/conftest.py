"""Runs that several tests of `common` take copies of."""

from pathlib import Path

import pytest

from tests.helpers.pool import Pool
from tests.helpers.run_folders import train


@pytest.fixture(scope="module")
def finished(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests take copies."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(pool, folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def stopped(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after 20 of 28 steps; tests take copies."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert train(pool, folder, "--max-steps", "20")[0] == 0
    return folder
