"""What the manifest keeps of the environment."""

import os
from unittest import mock

from common.manifest import environment


def test_all_of_nccls_variables_are_kept_and_no_secret() -> None:
    nccl = {"NCCL_IB_HCA": "mlx5", "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_DIST_USE_NCCL2": "0"}
    secret = {"NCCL_NET_TOKEN": "abc123", "HF_TOKEN": "abc123", "MY_NCCL_X": "1"}
    with mock.patch.dict(os.environ, nccl | secret, clear=True):
        assert environment() == nccl | {"NCCL_NET_TOKEN": "***"}


def test_other_nodes_of_slurm_are_no_other_environment() -> None:
    """An elastic job gets as many as there are."""
    with mock.patch.dict(os.environ, {"SLURM_JOB_NUM_NODES": "3"}, clear=True):
        assert environment() == {}
