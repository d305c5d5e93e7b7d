"""Laws of fsdp: every mesh trains like one plain process, and resumes from every other mesh."""

import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

from common import writing
from common.errors import InputError, PeerError, TrainingError
from common.group import process_group
from common.launch.ranks import Ranks
from common.run.options import flatten
from common.snapshots import snapshot_files
from common.snapshots.shards import copy_common, take_apart
from common.snapshots.snapshot_files import load_data_only
from common.snapshots.state import TrainingState
from common.weights import weights_sha256
from recipes.fsdp import memory, parallel, text
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.train import Config, train
from tests.helpers.commands import ROOT, Recipe, Result, wait_for
from tests.helpers.pool import PATIENCE_S, Pool, call_main, call_tool, in_group
from tests.helpers.run_folders import assert_record
from tests.helpers.training import assert_refused

CPU = torch.device("cpu")
SMALL = TransformerOptions(layers=2, width=32, heads=4, tie_weights=False)
VOCABULARY = 50  # no number of ranks here divides it
OTHER = {"recompute": True, "reshard_after_forward": False}
MESHES = [
    *(((1, 2, 1), {}), ((1, 2, 1), OTHER), ((2, 2, 1), {}), ((1, 2, 2), {})),
    *(
        pytest.param(sizes, {}, marks=pytest.mark.slow)
        for sizes in ((1, 1, 1), (1, 4, 1), (1, 1, 2), (2, 1, 2))
    ),
    pytest.param((1, 2, 2), OTHER, marks=pytest.mark.slow),
]
"""replicas x shard x tensor parallel, and options"""

Weights = dict[str, Tensor]
Sizes = tuple[int, int, int]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, VOCABULARY, (8, 13), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def steps(
    model: Transformer, count: int, share: int, shares: int, clip: Callable[[], Tensor]
) -> list[float]:
    """Train on a share of each batch; the norms of the gradient."""
    optimizer, norms = parallel.make_adamw(model, 0.003, 0.1), []
    for step in range(count):
        tokens, targets = (part.chunk(shares)[share] for part in batch(step))
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_meta(recompute: bool = False) -> Transformer:
    with torch.device("meta"):
        return Transformer(SMALL, VOCABULARY, recompute).double()


@cache
def plain(count: int) -> tuple[Weights, list[float]]:
    """One process, torch's own clipping; weights and norms."""
    model: Transformer = on_meta().to_empty(device="cpu")
    parallel.initialize(model, 0)
    norms = steps(model, count, 0, 1, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return {name: value.detach() for name, value in model.state_dict().items()}, norms


def on_mesh(
    ranks: Ranks, sizes: Sizes, how: dict[str, bool] | None = None, fault: str = ""
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """This rank's pieces of the weights before and after 20 steps, and the norms."""
    replicas, shard, tensor = sizes
    options = parallel.ParallelOptions(shard, replicas, tensor, **(how or {}))
    mesh = parallel.make_mesh(CPU, options.sizes(ranks.world_size))
    model = on_meta(options.recompute)
    parallel.parallelise(model, mesh, options)
    model.to_empty(device="cpu")
    parallel.initialize(model, 0)

    def pieces() -> dict[str, Any]:
        _, found = take_apart(model.state_dict(), mesh)
        return {name: (piece.clone(), starts) for name, (piece, starts) in found.items()}

    def clip() -> Tensor:
        if fault == "local norm":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_reduce", lambda _: None)
                return parallel.clip_by_global_norm(model, 0.5, mesh)
        return parallel.clip_by_global_norm(model, 0.5, mesh)

    begun = pieces()
    with pytest.MonkeyPatch.context() as patch:
        if fault == "no reduction":
            name = "reduce_scatter_single"  # torch 2.10 uses the other one
            patch.setattr(dist, name if hasattr(dist, name) else "reduce_scatter_tensor", own_part)
        norms = steps(model, 20, *parallel.data_ranks(mesh), clip)
    return begun, pieces(), norms


def own_part(output: Tensor, input: Tensor, group: Any, **_: Any) -> None:
    """In place of a collective: a rank ignores what the other ranks have."""
    output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def together(pieces: list[dict[str, Any]], like: Weights) -> Weights:
    """The whole weights, from the pieces of every rank."""
    whole = {name: torch.full_like(value, torch.nan) for name, value in like.items()}
    for name, value in whole.items():
        for own in pieces:
            if piece := own.get(f"[{name!r}]"):
                copy_common((value, [0] * value.ndim), piece)
    return whole


def difference(a: Weights, b: Weights) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


@pytest.mark.parametrize(("sizes", "how"), MESHES)
def test_every_mesh_trains_like_one_plain_process(
    pool: Pool, sizes: Sizes, how: dict[str, bool], capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights and gradient norms after 20 clipped steps; the initial weights to the bit."""
    (initial, _), (expected, norms) = plain(0), plain(20)
    assert min(norms) > 0.5, "every step is clipped"
    found = pool.run(in_group, sizes[0] * sizes[1] * sizes[2], on_mesh, sizes, how)
    begun = together([first for first, _, _ in found], initial)
    assert all(torch.equal(begun[name], value) for name, value in initial.items())
    assert difference(together([last for _, last, _ in found], expected), expected) < 1e-10
    for _, _, own in found:
        assert own == pytest.approx(norms, rel=1e-10)
    assert "suboptimal" not in capfd.readouterr().err


@pytest.mark.parametrize("fault", ["no reduction", "local norm"])
def test_a_wrong_reduction_would_be_seen(pool: Pool, fault: str) -> None:
    expected, norms = plain(20)
    found = pool.run(in_group, 2, on_mesh, (1, 2, 1), None, fault)
    weights = together([last for _, last, _ in found], expected)
    assert difference(weights, expected) > 1e-6
    assert found[0][2] != pytest.approx(norms, rel=1e-6)


def groups_of_a_mesh(_ranks: Ranks) -> dict[str, float]:
    """Each group's name, and how long a rank waits in it [s]."""
    groups: list[Any] = parallel.make_mesh(CPU, (2, 2, 1)).get_all_groups()
    return {g.group_name: g._get_backend(CPU).options._timeout.total_seconds() for g in groups}


def kept(_ranks: Ranks) -> set[str]:
    return {group.group_name for group in process_group._kept}


def test_a_rank_waits_in_a_meshs_groups_as_long_as_in_the_runs_own(pool: Pool) -> None:
    found = pool.run(in_group, 4, groups_of_a_mesh)
    assert [set(waits_s.values()) for waits_s in found] == [{PATIENCE_S / 2}] * 4
    deadlocks = torch.__version__ < "2.12"  # in a group's destructor
    for waits_s, names in zip(found, pool.run(kept, 4), strict=True):
        assert waits_s.keys() <= names if deadlocks else not names


def test_windows_are_a_pure_function_of_seed_epoch_and_index() -> None:
    content = torch.arange(200, dtype=torch.uint8)
    one, other = (text.Windows(content, 16, seed) for seed in (3, 4))
    keys = [(2, index) for index in range(len(one))]
    tokens, targets = one.__getitems__(keys)
    assert torch.equal(targets, tokens + 1)
    for key, expected in zip(keys, tokens, strict=True):
        assert torch.equal(one.__getitems__([key])[0][0], expected), "whatever else is in the batch"
    assert not torch.equal(other.__getitems__(keys)[0], tokens)
    assert not torch.equal(one.__getitems__([(3, i) for _, i in keys])[0], tokens)
    held_out = text.Windows(content, 16, None)
    targets = held_out.__getitems__([(0, index) for index in range(len(held_out))])[1]
    assert targets.flatten().tolist() == list(range(1, 193)), "each target once"


def test_bits_of_texts_whose_bits_are_known() -> None:
    def bits(train: Tensor, val: Tensor) -> float:
        return text.bigram_bits_per_byte(train, text.Windows(val, 16, None))

    turns = torch.tensor([97, 98], dtype=torch.uint8).repeat(5000)
    assert bits(turns, turns) < 0.01, "the next byte is certain"
    noise = torch.randint(97, 101, (200_000,), generator=torch.Generator().manual_seed(0))
    assert bits(noise.byte(), noise.byte()) == pytest.approx(2, abs=0.01)
    certain = torch.full((2, 3, 4), 0.0)
    scores = text.Text(None, 1.5, 0).score(lambda _: certain, (None, torch.zeros(2, 3).long()))  # type: ignore[arg-type]
    assert scores["bits_per_character"].tolist() == [3.0, 3.0], "2 bits per byte, 1.5 bytes each"


# The recipe itself: snapshots, resume, other meshes


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}: naïve, but true.\n" for n in range(300)))
    return path


def run_fsdp(ranks: Ranks, folder: Path, book: Path, sizes: Sizes, options: dict[str, Any]) -> None:
    default = Config()
    replicas, shard, tensor = sizes
    run = {"output_dir": folder, "precision": "fp64", "log_every": 1, **options.get("run", {})}
    optimizer = {"epochs": 2, "global_batch_size": 32, **options.get("optimizer", {})}
    config = Config(
        run=replace(default.run, **run),
        text=replace(default.text, data="text", data_path=book, context=16),
        model=TransformerOptions(layers=2, width=32, heads=4),
        optimizer=replace(default.optimizer, **optimizer),
        parallel=parallel.ParallelOptions(shard, replicas, tensor),
    )
    noted = BufferingHandler(100)
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(noted)
    try:
        train(config, ranks)
    finally:
        logger.removeHandler(noted)
    assert not noted.buffer, "torch warns of suboptimal transfers"


def fsdp(pool: Pool, folder: Path, book: Path, sizes: Sizes, **options: Any) -> Result:
    pool.run(run_fsdp, sizes[0] * sizes[1] * sizes[2], folder, book, sizes, options)
    return Result(0, "", "", folder)


@pytest.mark.parametrize("sizes", [(1, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_interrupted_in_mid_epoch_and_resumed_is_uninterrupted(
    pool: Pool, tmp_path: Path, book: Path, sizes: Sizes
) -> None:
    run = {"precision": "fp32", "keep_snapshots": 2}
    whole = fsdp(pool, tmp_path / "whole", book, sizes, run=run)
    for last in (4, 19, None):
        cut = fsdp(pool, tmp_path / "cut", book, sizes, run=run, optimizer={"max_steps": last})
    assert cut.summary["resumed_from"] == 19
    assert cut.summary["steps"] > 2 * 16, "19 is in mid-epoch"
    assert (cut.sha, cut.losses) == (whole.sha, whole.losses)
    assert cut.metrics[-1] == whole.metrics[-1], "the epoch's mean loss goes on too"
    files = sorted(path.name for path in (tmp_path / "cut" / "snapshots").iterdir())
    world = sizes[1] * sizes[2]
    assert len(files) == 2 * (1 + world), "old shards go with their snapshot"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_finished_run_is_evaluated_to_the_bit(
    pool: Pool, tmp_path: Path, book: Path, precision: str
) -> None:
    options = {"run": {"precision": precision}, "optimizer": {"max_steps": 3}}
    run = fsdp(pool, tmp_path / "run", book, (1, 2, 1), **options)
    words = [str(run.folder), "--json", "--num-workers", "0"]
    for world_size in (1, 3):
        status, printed, said = pool.run(call_tool, world_size, "tools.evaluate", words)[0]
        assert status == 0, said
        found = json.loads(printed.splitlines()[-1])
        assert found.pop("held_out")
        assert found == {name: run.summary[name] for name in found}
        assert {"val_loss", "val_bits_per_character", "weights_sha256"} <= found.keys()


@pytest.fixture(scope="module")
def moved(pool: Pool, tmp_path_factory: pytest.TempPathFactory, book: Path) -> Result:
    """A run that was stopped and resumed on other meshes, last on shard 2 x tensor-parallel 2."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    legs = [((1, 4, 1), 5), ((1, 1, 2), 11), ((1, 1, 1), 15), ((2, 2, 1), 20), ((1, 2, 2), None)]
    for sizes, last in legs:
        resumed = fsdp(pool, folder, book, sizes, optimizer={"max_steps": last})
    return resumed


def test_another_mesh_goes_on_at_the_same_sample(
    pool: Pool, tmp_path: Path, book: Path, moved: Result
) -> None:
    whole, resumed = fsdp(pool, tmp_path / "whole", book, (1, 1, 1)), moved
    assert resumed.summary["resumed_from"] == 20
    said = (moved.folder / "logs" / "rank_0.log").read_text()
    assert (
        "the snapshot is of 4 ranks (replica 2, shard 2, tensor 1), this run has 4 (replica 1, "
        "shard 2, tensor 2): it resumes at the same sample, but not with the same bits"
    ) in said
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-10)
    assert resumed.metrics[-1]["train_loss"] == pytest.approx(whole.metrics[-1]["train_loss"])
    assert resumed.summary["val_bits_per_character"] == pytest.approx(
        whole.summary["val_bits_per_character"], rel=1e-10
    )


def test_the_whole_model_loads_in_a_plain_process(book: Path, moved: Result) -> None:
    """It predicts what the sharded model predicted, and the run's folder keeps nothing else."""
    run = moved
    weights = torch.load(run.folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == run.sha
    model = Transformer(TransformerOptions(layers=2, width=32, heads=4), text.VOCABULARY).double()
    model.load_state_dict(weights)
    options = text.TextOptions(data="text", data_path=book, context=16)
    held_out = in_group(Ranks(), lambda _: text.load_text(options, 0)).data.val
    tokens, targets = held_out.__getitems__([(0, index) for index in range(len(held_out))])
    with torch.no_grad():
        logits = model(tokens).flatten(0, 1)
    loss = float(cross_entropy(logits, targets.flatten()))
    assert loss == pytest.approx(run.metrics[-1]["val_loss"], rel=1e-10)
    assert not list(run.folder.glob("*.tmp"))


def test_gloo_gathers_the_whole_model_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 ended by SIGSEGV where it gathered a GPU's tensors."""
    model, on_cpu, gathered = nn.Linear(3, 2), [], []
    before, cpu, redistribute = model.weight.detach().clone(), Tensor.cpu, DTensor.redistribute

    def to_cpu(value: DTensor) -> Tensor:
        on_cpu.append(found := cpu(value))
        return found

    def gather(value: DTensor, **more: Any) -> DTensor:
        gathered.append(value)
        return redistribute(value, **more)

    def train_nothing(_ranks: Ranks) -> Weights:
        fully_shard(model, mesh=parallel.make_mesh(CPU, (1, 1, 1))["shard"])
        return parallel.whole_model(model, tmp_path)

    monkeypatch.setattr(DTensor, "cpu", to_cpu, raising=False)
    monkeypatch.setattr(DTensor, "redistribute", gather)
    whole = in_group(Ranks(), train_nothing)
    assert torch.equal(whole["weight"], before)
    assert [id(value) for value in gathered] == [id(value) for value in on_cpu]
    assert len(gathered) == 2


@pytest.mark.parametrize(
    "fault",
    [
        "missing",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in ("torn", "of another step", "of another run")
        ),
    ],
)
def test_an_unsound_shard_is_named_and_the_snapshot_before_is_taken(
    pool: Pool, tmp_path: Path, book: Path, fault: str
) -> None:
    folder, sizes = tmp_path / "run" / "snapshots", (1, 2, 1)
    for last in (3, 6):
        fsdp(pool, tmp_path / "run", book, sizes, optimizer={"max_steps": last})
    older, newest = sorted(folder.glob("step_*.rank_00001.*.shard"))
    if fault == "missing":
        newest.unlink()
    elif fault == "torn":
        newest.write_bytes(newest.read_bytes()[:-100])
    elif fault == "of another step":
        newest.write_bytes(older.read_bytes())
    else:
        fsdp(pool, tmp_path / "other", book, sizes, run={"seed": 1}, optimizer={"max_steps": 6})
        (other,) = (tmp_path / "other" / "snapshots").glob("step_*.rank_00001.*.shard")
        newest.write_bytes(other.read_bytes())
    before = {path: path.read_bytes() for path in folder.iterdir()}
    resumed = fsdp(pool, tmp_path / "run", book, sizes, optimizer={"max_steps": 4})
    assert resumed.summary["resumed_from"] == 3
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    kind = "missing" if fault == "missing" else "torn or altered"
    assert f"{newest.name} is {kind}" in log
    for path, content in before.items():
        aside = path.with_suffix(".unsound")
        assert (path if path.exists() else aside).read_bytes() == content, "the evidence stays"
    for path in folder.glob("*.shard"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"snapshots in .* can be used"):
        fsdp(pool, tmp_path / "run", book, sizes, optimizer={"max_steps": 8})


def test_bf16_keeps_fp32_weights_and_resumes_from_a_named_snapshot_elsewhere(
    pool: Pool, tmp_path: Path, book: Path
) -> None:
    run: dict[str, Any] = {"precision": "bf16", "snapshot_every": 4}
    whole = fsdp(pool, tmp_path / "whole", book, (1, 2, 1), run=run, optimizer={"max_steps": 7})
    (path,) = (whole.folder / "snapshots").glob("step_00000004.*.pt")
    run["resume"] = path
    second = fsdp(pool, tmp_path / "second", book, (1, 2, 1), run=run, optimizer={"max_steps": 7})
    assert second.summary["resumed_from"] == 4
    assert second.sha == whole.sha
    weights = torch.load(second.folder / "model.pt", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert not all(torch.equal(v, v.bfloat16().float()) for v in weights.values())
    next(path.parent.glob("step_00000004.rank_00001.*.shard")).unlink()
    with pytest.raises(InputError, match=r"rank_00001\..*\.shard is missing: .* cannot be used"):
        fsdp(pool, tmp_path / "third", book, (1, 2, 1), run=run, optimizer={"max_steps": 7})


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_default_run_predicts_better_than_a_bigram_model(recipe: Recipe) -> None:
    result = recipe("fsdp").assert_ok()
    result.assert_bits_of_the_record()
    assert_record(result.folder)
    found = result.summary
    assert found["val_bits_per_character"] < 0.75 * found["bigram_bits_per_character"]


class Rows:
    """A state of one tensor, divided between the ranks; its values tell the step and the rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.step = mesh["shard"], 0.0

    def state_dict(self) -> dict[str, Any]:
        local = torch.full((3, 400), 10.0 * self.step + self.mesh.get_local_rank())
        return {"weight": DTensor.from_local(local, self.mesh, [Shard(0)])}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


def save_broken_rows(ranks: Ranks, folder: Path) -> str:
    mesh = parallel.make_mesh(CPU, (1, 2, 1))
    rows = Rows(mesh)
    rows.step = float("nan") if ranks.rank == 1 else 1
    state = TrainingState({"model": rows}, torch.zeros(1), mesh, step=7)
    state.save(folder, {}, keep=1)
    with pytest.raises((TrainingError, PeerError)) as failed:
        state.wait()
    return str(failed.value)


def test_a_shard_that_cannot_be_written_is_told_to_every_rank(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(in_group, 2, save_broken_rows, tmp_path):
        assert "['model']['weight'] is not finite after step 7" in said
    assert not list(tmp_path.glob("*.pt")), "no snapshot without all of its shards"


class Mortal:
    """A file whose writer may die between any two halves of what it writes."""

    def __init__(self, file: Any, event: Callable[[], None]) -> None:
        self.file, self.event = file, event

    def write(self, data: Any) -> int:
        for half in (bytes(data)[: len(data) // 2], bytes(data)[len(data) // 2 :]):
            self.event()
            self.file.write(half)
            self.file.flush()
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Mortal":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()


def die_at(point: int, events: Any) -> None:
    """Let this process die at one of the events of writing files; `events` counts them."""

    def event() -> None:
        events.value += 1
        if events.value == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            event()
            result = function(*args, **how)
            event()
            return result

        return call

    opened = open
    vars(writing)["open"] = lambda *how, **more: Mortal(opened(*how, **more), event)
    os.rename = around(os.rename)
    os.fsync = around(os.fsync)


def write_two(rank: int, folder: Path, victim: int, point: int, events: Any) -> None:
    """Write the snapshots of steps 1 and 2 as one of two ranks; the victim dies in the second."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = parallel.make_mesh(CPU, (1, 2, 1))
    rows = Rows(mesh)
    state = TrainingState({"model": rows}, torch.zeros(1), mesh)
    for state.step in (1, 2):
        rows.step = state.step
        if (rank, state.step) == (victim, 2):
            die_at(point, events)
        state.save(folder / "snapshots", {}, keep=3)
        state.wait()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_point_of_a_write_spoils_nothing(tmp_path: Path, victim: int) -> None:
    """Between the first byte of a shard and the rename of the file that names the shards."""
    context = multiprocessing.get_context("forkserver")
    # torch 2.15 imports the second one with the first DTensor: most of the time of a round.
    context.set_forkserver_preload(["tests.recipes.test_fsdp", "torch._dynamo"])
    seen, rounds = set(), 0
    for point in range(1, 200):
        folder, events = tmp_path / str(point), context.Value("i", 0)
        folder.mkdir()
        pair = [
            context.Process(target=write_two, args=(rank, folder, victim, point, events))
            for rank in range(2)
        ]
        for process in pair:
            process.start()
        pair[victim].join(PATIENCE_S)
        ended = pair[victim].exitcode
        for process in pair:
            process.kill()
            process.join()
        found = in_group(
            Ranks(), lambda _, at=folder: snapshot_files.find("auto", at / "snapshots", {})
        )
        expected = torch.tensor(
            [[10.0 * found["step"] + rank] * 400 for rank in (0, 0, 0, 1, 1, 1)]
        )
        weight = torch.full_like(expected, torch.nan)
        for shard in found["shards"]:
            pieces = load_data_only(Path(shard))["pieces"]
            copy_common((weight, [0, 0]), pieces["['model']['weight']"])
        assert torch.equal(weight, expected), f"point {point}"
        seen.add(found["step"])
        rounds += 1
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert seen == {1, 2}
    assert rounds > 20


# Memory


DOMINATES = {
    "model": (TransformerOptions(layers=4, width=256, heads=4), (2, 128)),
    "activations": (TransformerOptions(), (16, 128)),
}
"""What needs most of the memory, and a model and a batch for which this is so."""
ZERO_2 = {"reshard_after_forward": False}


def measured(ranks: Ranks, sizes: Sizes, how: dict[str, bool], what: str) -> dict[str, int]:
    """Bytes that a rank holds after a backward pass, and most at once in a step."""
    options = parallel.ParallelOptions(sizes[1], sizes[0], sizes[2], **how)
    mesh = parallel.make_mesh(CPU, sizes)
    of_model, shape = DOMINATES[what]
    tokens = torch.zeros(shape, dtype=torch.int64)
    with torch.device("meta"):
        model = Transformer(of_model, text.VOCABULARY, options.recompute)
    parallel.parallelise(model, mesh, options)
    model.to_empty(device="cpu")
    parallel.initialize(model, 0)
    optimizer = parallel.make_adamw(model, 0.01, 0)

    def backward() -> None:
        cross_entropy(model(tokens).transpose(1, 2), tokens).backward()

    backward()
    held = memory.held(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with memory.HeapGrowth() as step:
        backward()
        optimizer.step()
    return {**held, "peak": held["parameters"] + held["optimizer"] + step.bytes}


def counted(sizes: Sizes, how: dict[str, bool], what: str) -> dict[str, int]:
    options = parallel.ParallelOptions(sizes[1], sizes[0], sizes[2], **how)
    of_model, shape = DOMINATES[what]
    return memory.count(sizes, options, of_model, *shape, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("sizes", "how", "what"),
    [
        *(((1, n, 1), {}, "model") for n in (1, 2, 4)),
        *(((1, 2, 1), ZERO_2, "model"), ((1, 2, 1), {}, "activations")),
        *(
            pytest.param(sizes, how, what, marks=pytest.mark.slow)
            for sizes in ((1, 4, 1), (2, 2, 1), (1, 2, 2))
            for how in (ZERO_2, {"recompute": True})
            for what in DOMINATES
        ),
    ],
)
def test_bytes_are_counted_as_they_are_held(
    pool: Pool, sizes: Sizes, how: dict[str, bool], what: str
) -> None:
    """The parts exactly; the most at once within 10 %."""
    world, said = sizes[0] * sizes[1] * sizes[2], counted(sizes, how, what)
    found = pool.run(in_group, world, measured, sizes, how, what)
    for kind in ("parameters", "gradients", "optimizer"):
        assert max(held[kind] for held in found) == said[kind]
    assert max(held["peak"] for held in found) == pytest.approx(said["peak"], rel=0.1)
    if what == "model":
        share = said["optimizer"] / counted((1, 1, 1), how, what)["optimizer"]
        assert share <= {1: 1, 2: 0.60, 4: 0.60 if sizes[0] > 1 else 0.35}[world]


@pytest.mark.parametrize("what", DOMINATES)
def test_activations_are_counted_as_autograd_keeps_them(what: str) -> None:
    of_model, shape = DOMINATES[what]
    model, tokens = Transformer(of_model, text.VOCABULARY), torch.zeros(shape, dtype=torch.int64)
    kept, _ = memory.saved(model, lambda: cross_entropy(model(tokens).transpose(1, 2), tokens))
    assert kept == counted((1, 1, 1), {}, what)["activations"]


# The command lines


def test_fsdp_through_the_front_door(recipe: Recipe, pool: Pool, book: Path) -> None:
    options = ("--data", "text", "--data-path", book, "--context", 16, "--layers", 1)
    more = ("--width", 16, "--heads", 2, "--epochs", 1, "--nproc", 2, "--shard", 2)
    result = recipe("fsdp", *map(str, (*options, *more))).assert_ok()
    assert "fsdp: world_size 2 (launcher: recipes), device cpu" in result.stdout
    assert result.summary["bigram_bits_per_character"] > 0
    assert "val_bits_per_character" in result.metrics[-1]
    weights = torch.load(result.folder / "model.pt", weights_only=True)
    assert weights_sha256(weights) == result.sha
    asked = (result.folder, "--prompt", "7 times", "--length", "20")
    status, said, _ = command(pool, "tools.sample", *asked)
    assert status == 0
    assert said.startswith("7 times")
    assert len(said.encode()) >= 20


@pytest.mark.slow
def test_killed_under_torchrun_and_resumed_by_the_front_door_is_one_hash(
    recipe: Recipe, book: Path
) -> None:
    text = ("--data", "text", "--data-path", str(book), "--context", "16")
    size = ("--layers", "1", "--width", "16", "--heads", "2")
    options = (*text, *size, "--epochs", "20", "--snapshot-every", "7")
    whole = recipe("fsdp", *options, "--nproc", "2", folder="whole").assert_ok()
    folder = recipe.tmp_path / "cut"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "recipes" / "fsdp" / "train.py"
    process = recipe.start(
        sys.executable, "-m", *torchrun, script, *options, "--output-dir", folder
    )
    wait_for(lambda: len(list(folder.glob("snapshots/step_*.pt"))) > 1)
    rank = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1]
    os.kill(int(rank), signal.SIGKILL)
    assert recipe.finish(process, folder).status == 1
    assert not (folder / "summary.json").exists(), "it was killed in time"
    resumed = recipe("fsdp", *options, "--nproc", "2", folder="cut").assert_ok()
    assert resumed.summary["resumed_from"] > 0
    assert (resumed.sha, resumed.losses) == (whole.sha, whole.losses)
    said = recipe.module("sample", folder, "--prompt", "7 times").assert_ok()
    assert said.stdout.startswith("7 times")


def command(pool: Pool, module: str, *arguments: str | Path) -> tuple[int, str, str]:
    (answer,) = pool.run(call_tool, 1, module, [str(a) for a in arguments])
    return answer  # type: ignore[no-any-return]


def test_a_dry_run_starts_nothing_and_counts_larger_meshes(pool: Pool, tmp_path: Path) -> None:
    ((status, told, _),) = pool.run(
        call_main, 1, "fsdp", ["--dry-run", "--nproc", "4", "--output-dir", str(tmp_path / "run")]
    )
    assert status == 0
    assert not (tmp_path / "run").exists()
    rows = [line.split(" ranks")[0].split(" = ")[1] for line in told.splitlines()[2:]]
    assert rows == ["4", "8", "64", "512"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--shard 2", "2 ranks, but this run has 1: --shard 1 would do with --nproc 1 or"),
        ("--replicas 2", "2 ranks, but this run has 1: start --nproc 2"),
        ("--tensor-parallel 3", "--tensor-parallel 3 does not divide --heads 4"),
        ("--replicas 0", "--replicas must be at least 1"),
        ("--width 100 --heads 3", "--width 100 is not a multiple of 2 x --heads 3"),
        ("--data text", "--data text and --data-path FILE_OR_FOLDER belong together"),
        ("--data text --data-path nowhere", "nowhere is neither a file nor a folder with files"),
        ("--context 100000", r"466,117 bytes|the text has .* bytes: give at least"),
        ("--clip-grad-norm 0", "--clip-grad-norm must be positive"),
        ("--best-by val_loss", "best-by"),
        ("--precision fp16", "precision"),
        ("--dry-run --nproc 4 --shard 3", "3 ranks, but this run has 4: --shard 4 would do"),
    ],
)
def test_options_that_cannot_work(pool: Pool, tmp_path: Path, options: str, says: str) -> None:
    given: list[str | Path] = [*options.split(), "--output-dir", tmp_path / "run"]
    if "--nproc" not in options:
        given += ["--nproc", "1"]
    assert_refused(pool, says, *given, name="fsdp")


def test_bytes_that_are_no_text_are_named(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abc" * 1000)
    (tmp_path / "texts" / "b.bin").write_bytes(b"\xff\xfe")
    folders: list[str | Path] = [
        "--data-path",
        tmp_path / "texts",
        "--output-dir",
        tmp_path / "run",
    ]
    given: list[str | Path] = ["--nproc", "1", "--data", "text", *folders]
    assert_refused(pool, r"b\.bin is not a readable UTF-8 text", *given, name="fsdp")


def test_sample_refuses_what_is_no_finished_run_of_fsdp(pool: Pool, tmp_path: Path) -> None:
    config = json.dumps({"recipe": "fsdp", **flatten(Config())})
    hash_ = json.dumps({"recipe": "fsdp", "weights_sha256": 64 * "0"})
    for file, content, says in (
        ("none", "", "is not the folder of a run: it holds no config.json"),
        ("config.json", '{"recipe": "x"}', "is a run of x: only models of fsdp write text"),
        ("config.json", config, "has not finished: run its command again"),
        ("summary.json", "{}", "summary.json is damaged (no 'recipe')"),
        ("summary.json", hash_, "model.pt is missing: restore it"),
        ("model.pt", "torn", "model.pt is not what the run wrote"),
    ):
        (tmp_path / file).write_text(content)
        status, _, said = command(pool, "tools.sample", tmp_path)
        assert (status, said.count("error:")) == (2, 1), said
        assert says in said
    status, _, said = command(pool, "tools.sample", tmp_path, "--temperature", "0")
    assert status == 2
    assert "--temperature above 0" in said
