"""Clusters for all their tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.cluster import STRICT, Cluster, make_folder
from tests.helpers.machine import need, need_root


def _run(settings: dict[str, str]) -> Iterator[Cluster]:
    need_root()
    need("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "ip")
    running = Cluster(make_folder(), settings)
    yield running
    running.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four nodes, up in a second."""
    yield from _run({})


@pytest.fixture(scope="module")
def strict() -> Iterator[Cluster]:
    """The nodes of a site that holds jobs to their cores and memory."""
    yield from _run(STRICT)
