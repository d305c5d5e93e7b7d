"""One cluster for all its tests."""

from collections.abc import Iterator

import pytest

from tests.conftest import need, need_root
from tests.slurm.cluster import Cluster, make_folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four nodes, up in a second."""
    need_root()
    need("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "ip")
    running = Cluster(make_folder())
    yield running
    running.close()
