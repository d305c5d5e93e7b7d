"""Laws of checkpoint_rnn: less memory, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.run.options import RunOptions
from recipes.checkpoint_rnn import adding as rnn
from recipes.checkpoint_rnn import plan
from recipes.checkpoint_rnn.plan import search
from tests.helpers.commands import Recipe
from tests.helpers.gradients import CPU, gradients, relative_difference

LIMIT = 1_200_000_000


# checkpoint_rnn


def recurrent_gradients(segments: int) -> dict[str, Tensor]:
    """Gradients in float64 of two layers with dropout between them."""
    torch.manual_seed(0)
    sequence = rnn.SequenceOptions(length=50, input_size=3)
    model = rnn.AddingRNN(rnn.RecurrentOptions(8, layers=2, dropout=0.5), sequence).double()
    for name, parameter in model.named_parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
        if "bias_ih" in name:  # what the first segment saw must still matter at the end
            parameter.data[8:16] = 5
    inputs = torch.rand(6, 50, 3, dtype=torch.float64)
    nn.functional.mse_loss(model(inputs, segments), rnn.targets(inputs)).backward()
    return gradients(model)


@pytest.mark.parametrize("segments", [2, 7, 49, 50])
def test_recomputed_gradients_are_the_plain_ones_with_dropout(segments: int) -> None:
    assert relative_difference(recurrent_gradients(segments), recurrent_gradients(1)) < 1e-12


def test_dropout_drawn_otherwise_in_the_backward_pass_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful(*arguments: Any, **options: Any) -> Any:
        return checkpoint(*arguments, **{**options, "preserve_rng_state": False})

    monkeypatch.setattr(rnn, "checkpoint", forgetful)
    assert relative_difference(recurrent_gradients(7), recurrent_gradients(1)) > 0.1


def test_the_search_takes_the_fastest_that_fits_and_knows_the_least() -> None:
    measured = []

    def probe(segments: int) -> tuple[int, float] | None:
        """Memory of a segment and of the states; recomputing all but the last segment."""
        measured.append(segments)
        memory = 1000 * 400 // segments + 1000 * segments
        return None if memory > 300_000 else (memory, 2 - 1 / segments + 0.001 * segments)

    assert {f["segments"] for f in search(400, 70_000, probe)} >= {20, 40, 10, 5}
    assert 1 not in measured, "which would take six times the budget"
    everything = search(400, 10**9, probe)
    assert min(everything, key=lambda f: float(f["bytes"]))["segments"] == 20
    assert 1 not in {f["segments"] for f in everything}, "memory ran out there"


@pytest.mark.parametrize(
    ("said", "ran_out"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_a_lack_of_memory_is_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, said: str, ran_out: bool
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(plan, "train_step", fail)
    monkeypatch.setattr(plan, "set_determinism", lambda **_: None)  # it is the tests' own
    monkeypatch.setattr(plan, "seed_everything", lambda *_: None)
    sizes = rnn.SequenceOptions(length=8, train_samples=2), rnn.RecurrentOptions(2), RunOptions()
    if ran_out:
        assert plan.step_cost(*sizes, 2, CPU, 2) is None
    else:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            plan.step_cost(*sizes, 2, CPU, 2)


@pytest.mark.slow
def test_a_budget_is_kept_where_the_system_allows_no_more(recipe: Recipe) -> None:
    """A limit on the process (RLIMIT_DATA) under which the plain run dies, and auto trains."""
    options = (
        *(
            "--length 1000 --hidden-size 96 --global-batch-size 128 --train-samples 128 "
            "--val-samples 64 --epochs 1"
        ).split(),
    )
    budget = 150_000_000

    def limited(folder: str, *more: str) -> Any:
        command = recipe.command("checkpoint_rnn", *options, *more, folder=folder)
        process = recipe.start("prlimit", f"--data={LIMIT}", *command)
        return recipe.finish(process, recipe.tmp_path / folder)

    plain = limited("plain")
    assert plain.status == 1
    assert "memory" in plain.errors[0]
    auto = limited("auto", "--segments", "auto", "--memory-budget", str(budget)).assert_ok()
    assert 1 < auto.summary["segments"] < 1000
    assert 0 < auto.summary["training_memory_bytes"] <= budget
