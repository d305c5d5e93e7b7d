"""Clusters for all their tests."""

from collections.abc import Iterator

import pytest

from tests.conftest import need, need_root
from tests.slurm.cluster import STRICT, Cluster, make_folder


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
