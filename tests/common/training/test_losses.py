"""Weights of classes: scikit-learn's numbers, in the loss as scikit-learn takes them."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import cross_entropy

from common.data.datasets import DataOptions, digits_data, load_data
from common.errors import InputError
from common.identity import decisive, differences
from common.launch.ranks import Ranks
from common.run.options import flatten
from common.training import LossOptions, ModelOptions, build_model, cross_entropy_of_samples
from recipes.ddp_launch.train import Config
from tests.helpers.images import flowers, photo, small_fashion_mnist
from tests.helpers.pool import Pool, call_main, in_group
from tests.helpers.training import training

BALANCED = LossOptions(class_weights="balanced")


def test_weights_are_scikit_learns() -> None:
    labels = np.random.default_rng(0).choice(4, 500, p=[0.7, 0.2, 0.06, 0.04])
    data = SimpleNamespace(labels=labels, train=labels, class_names=["a", "b", "c", "d"])
    weights = cross_entropy_of_samples(BALANCED, data).weight
    assert weights is not None
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    assert weights.tolist() == pytest.approx(expected.tolist(), rel=1e-15)
    assert float(weights[labels].mean()) == pytest.approx(1, rel=1e-12)
    assert cross_entropy_of_samples(LossOptions(), data).weight is None
    data.class_names = ["a", "b", "c", "d", "none"]
    with pytest.raises(InputError, match="no training sample of class none"):
        cross_entropy_of_samples(BALANCED, data)
    for wrong in (labels + 2, labels - 1, labels / 2, [str(label) for label in labels]):
        data.labels = wrong
        with pytest.raises(InputError, match="must be whole numbers from 0 to 4"):
            cross_entropy_of_samples(BALANCED, data)
    data.labels = ()
    with pytest.raises(InputError, match=r"needs Data\(labels=...\).* each of 500 .* got 0"):
        cross_entropy_of_samples(BALANCED, data)
    with pytest.raises(ValueError, match="--label-smoothing must be from 0 to below 1, got 1"):
        LossOptions(label_smoothing=1.0)


def test_runs_that_are_older_than_these_options_go_on() -> None:
    options = {"recipe": "ddp_launch", **flatten(Config())}
    older = {name: options[name] for name in options.keys() - asdict(LossOptions()).keys()}
    assert not differences(decisive(older, Config), decisive(options, Config))


def labels_are_those_of_the_samples(ranks: Ranks, folder: Path) -> None:
    cases: Any = (("digits", None), ("fake", None), ("fashion_mnist", folder / "fashion"))
    for kind, path in cases:
        data = load_data(DataOptions(data=kind, data_path=path), 0, ranks)
        assert [int(data.train[(0, n)][1]) for n in range(len(data.train))] == [*data.labels], kind
    photos = DataOptions("imagefolder", folder / "photos", image_size=32)
    data = load_data(photos, 0, ranks)
    assert Counter(data.labels) == {0: 16, 1: 8}
    assert [int(data.train[(0, n)][1]) for n in range(len(data.train))] == [*data.labels]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    flowers(root / "photos")
    for number in range(10, 20):
        photo(root / "photos" / "daisy" / f"{number}.jpg", number)
    small_fashion_mnist(root / "fashion")
    return root


def test_the_data_sets_know_their_labels(pool: Pool, folder: Path) -> None:
    pool.run(in_group, 1, labels_are_those_of_the_samples, folder)


def test_the_loss_is_the_weighted_sum_over_the_samples_of_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    """A batch of all 1,437 samples, on three ranks, against one sum that no rank computes."""
    torch.manual_seed(1)
    model = build_model(ModelOptions(), 1, 10, 8)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    run = training(
        pool,
        3,
        tmp_path / "run",
        run={"precision": "fp64", "log_every": 1},
        data={"augment": False},
        model={"weights": tmp_path / "weights.pth"},
        loss={"class_weights": "balanced", "label_smoothing": 0.1},
        optimizer={"global_batch_size": 1437, "max_steps": 1},
    )
    data = digits_data(DataOptions(augment=False), 0)
    images, labels = data.train.__getitems__([(0, n) for n in range(len(data.train))])
    weights = compute_class_weight("balanced", classes=np.arange(10), y=labels.numpy())
    losses = cross_entropy(
        model.double()(images.double()),
        labels,
        torch.from_numpy(weights),
        reduction="none",
        label_smoothing=0.1,
    )
    assert run.losses[1] == pytest.approx(float(losses.detach().mean()), rel=1e-12)


def test_the_weights_are_shown_before_training(pool: Pool, folder: Path, tmp_path: Path) -> None:
    options = f"--nproc 1 --data imagefolder --data-path {folder / 'photos'} --image-size 16"
    options += f" --class-weights balanced --max-steps 1 --output-dir {tmp_path / 'run'}"
    ((status, out, _),) = pool.run(call_main, 1, "ddp_launch", options.split())
    assert status == 0
    shown = "class weights: tulip 1.5 (8 samples), daisy 0.75 (16 samples)"
    assert 0 < out.index(shown) < out.index("train_loss")
