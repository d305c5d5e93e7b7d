"""The fault matrix: each fault really happens in a real run, and the run ends as it should.

`make test SUITE=faults` runs it and writes results/matrix.json.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator

from common import ROOT
from common.snapshots import snapshot_files
from tests.faults import matrix
from tests.helpers.commands import Recipe, Result, ranks_of, wait_for
from tests.helpers.hosts import launched, two_hosts
from tests.helpers.images import flowers
from tests.helpers.machine import disk_that_freezes, free_port, need, need_root, small_disk
from tests.helpers.packs import DAMAGES, flip_image
from tests.helpers.pool import PATIENCE_S
from tests.helpers.run_folders import LONG, LOST, contents
from tools import pack

pytestmark = pytest.mark.slow

INJECT = Path(__file__).parent / "inject"
TIMEOUT_S = 8
OPTIONS = ("--epochs", "1", "--snapshot-every", "4", "--log-every", "1")
RECIPES = {
    "ddp_launch": (),
    "ddp_spawn": (),
    "model_parallel_toy": ("--model", "toy", "--stages", "2", "--schedule", "gpipe", "--lr", "0.1"),
}
AT = 6
"""The step after which a fault happens; the snapshot of step 4 is the last."""


@dataclass(frozen=True)
class Fault:
    """What happens, and how the run must end."""

    says: str
    """The first line must match this."""
    status: int = 1
    options: tuple[str, ...] = ()
    recipes: tuple[str, ...] = tuple(RECIPES)
    rank: int = 1
    at: int = AT
    act: Callable[[Any, Path], None] | None = None
    """Causes the fault from outside, during training. None: the rank itself causes it."""
    step_s: float = 0.0


def signalled(*numbers: int) -> Callable[[Any, Path], None]:
    """Send signals to the launcher, one after another."""

    def act(process: Any, _folder: Path) -> None:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)

    return act


def interrupted(process: Any, _folder: Path) -> None:
    os.killpg(process.pid, signal.SIGINT)


HERE = re.escape(socket.gethostname())
DDP = ("ddp_launch", "ddp_spawn")
FLIPS = {
    f"flips a bit of a {where} (rank {rank})": Fault(
        rf"error: rank \d on {HERE}: \S+.* differs .*, at fault: rank 0 on {HERE} or rank 1 on "
        rf"{HERE}.*last good snapshot: step_00000004",
        recipes=("ddp_launch",),
        rank=rank,
        at=AT,
    )
    for rank in (0, 1)
    for where in ("weight", "momentum")
}
ABSENT = (
    rf"error: rank 1 on {HERE} did not come to \w+ \d+, which rank 0 on {HERE} calls at "
    r"\S+ \(\w+\): "
)
FAULTS = {
    "raises": Fault(rf"error: rank 1 on {HERE}: a bug of this test"),
    "exits": Fault(rf"error: rank 1 on {HERE} exited with status 7"),
    "exits as if it were finished": Fault(rf"error: rank 1 on {HERE} ended too early \(status 0\)"),
    "exits as if it were asked to stop": Fault(
        rf"error: rank 1 on {HERE} ended too early \(status 75\)"
    ),
    "is killed": Fault(rf"error: rank 1 on {HERE} was killed by SIGKILL: perhaps out of memory"),
    "stops answering": Fault(rf"error: rank 1 on {HERE} stopped answering \(stopped by a signal\)"),
    "sleeps for ever": Fault(rf"{ABSENT}it is at \S*sitecustomize.py:\d+ \(happen\)", recipes=DDP),
    "hangs in data loading": Fault(
        rf"error: rank 1 on {HERE}: got no batch for {TIMEOUT_S} s: it is at "
        r"\S*sitecustomize.py:\d+ \(<lambda>\)",
        options=("--num-workers", "0"),
        recipes=DDP,
    ),
    "keeps the GIL for ever": Fault(
        rf"{ABSENT}it is in C code that keeps the GIL, called at tests/faults/inject/"
        r"sitecustomize.py:\d+ \(happen"
    ),
    "waits in another collective": Fault(
        rf"error: rank 1 on {HERE} calls broadcast \d+ at \S*sitecustomize.py:\d+ \(happen\), "
        rf"while rank 0 on {HERE} calls all_reduce \d+ at \S+:\d+ ",
        recipes=DDP,
    ),
    "runs out of memory": Fault(
        rf"error: rank 1 on {HERE}: .*out of memory: try half the --global-batch-size"
    ),
    "loses a loading process": Fault(
        rf"error: rank [01] on {HERE}: .*a loading process died",
        options=("--num-workers", "1"),
        recipes=DDP,
    ),
    "calls another collective": Fault(
        rf"error: rank \d on {HERE}.*TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
    ),
    "leaves a parameter out": Fault(
        rf"error: rank 1 on {HERE}(: .*a parameter took no part in the loss on this rank"
        r"| was killed by SIGABRT: .*use every parameter\?)",
        recipes=DDP,
    ),
    "has a loss that is not finite": Fault(
        rf"error: rank \d on {HERE}: the loss is not finite on rank 1 by step 6", recipes=DDP
    ),
    **FLIPS,
    "sees the clock go back": Fault("", status=0, rank=0),
    "Ctrl-C": Fault("", status=130, act=interrupted, step_s=0.1, options=("--num-workers", "1")),
    "SIGTERM twice": Fault(
        "", status=75, act=signalled(signal.SIGTERM, signal.SIGTERM), step_s=0.1
    ),
    "SIGHUP (ssh is lost)": Fault(
        "", status=75, act=signalled(signal.SIGHUP), step_s=0.1, recipes=("ddp_launch",)
    ),
    "the launcher is killed": Fault(
        "", status=-signal.SIGKILL, act=signalled(signal.SIGKILL), step_s=0.1
    ),
}


@dataclass
class Scene:
    """One run with a fault in it."""

    recipe: Recipe
    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = self.recipe.tmp_path / "mark"
        self.env |= {
            "PYTHONPATH": f"{INJECT}:{ROOT}",
            "FAULT_MARK": str(self.mark),
            "SCENE": str(self.folder),
        }

    def gate(self, step: str) -> Path:
        """A file at which a run with `GATES` waits after that step, until it is deleted."""
        gate = self.recipe.tmp_path / "gates" / step
        gate.parent.mkdir()
        gate.touch()
        return gate

    def processes(self) -> list[int]:
        """Ids of all living processes of this scene, in any session or namespace."""
        found, word = [], f"SCENE={self.folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                state = (path.parent / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and word in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def wait_until_gone(self, since_s: float) -> float:
        """Seconds from `since_s` (monotonic) until all processes of the scene have ended."""
        wait_for(lambda: not self.processes())
        return time.monotonic() - since_s


@pytest.fixture
def scene(recipe: Recipe) -> Scene:
    return Scene(recipe, recipe.tmp_path / "run")


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    """The results; `make test SUITE=faults` has them written to a file."""
    found: list[dict[str, Any]] = []
    yield found
    if path := os.environ.get("FAULTS_JSON"):
        matrix.save(Path(path), found)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Result]]:
    """Each recipe's run without a fault."""
    runner = Recipe(tmp_path_factory.mktemp("whole"))
    yield {
        name: runner(name, *nproc(name), *OPTIONS, *options, folder=name).assert_ok()
        for name, options in RECIPES.items()
    }
    runner.stop()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of ddp_launch that ended after 9 of 14 steps; tests take copies."""
    runner = Recipe(tmp_path_factory.mktemp("begun"))
    options = (*nproc("ddp_launch"), *OPTIONS, "--max-steps", "9")
    yield runner("ddp_launch", *options).assert_ok().folder
    runner.stop()


SAID = {0: "finished", 1: "failed", 75: "stopped", 130: "stopped", -signal.SIGKILL: "running"}
"""Exit status to the status in status.json, which a killed run cannot write."""


def nproc(name: str) -> tuple[str, ...]:
    return ("--nproc", "2") if name != "model_parallel_toy" else ()


def shared_memory() -> set[Path]:
    """All files in /dev/shm, of all users."""
    return set(Path("/dev/shm").iterdir())


def assert_intact(folder: Path) -> int:
    """Check that the newest snapshot is whole; returns its step."""
    newest = snapshot_files.list_snapshots(folder / "snapshots")[0]
    assert not list(folder.glob("snapshots/*.tmp"))
    return int(snapshot_files.read(newest)["step"])


def row(*case: str, in_ci: bool = False) -> Any:
    """A fault (in a recipe), in CI or only by `make test SUITE=faults`."""
    return pytest.param(*case, marks=() if in_ci else pytest.mark.by_hand)


IN_CI = {*FAULTS} - {
    "exits",  # as if it were finished
    "exits as if it were asked to stop",
    "hangs in data loading",  # as it sleeps for ever
    "flips a bit of a momentum (rank 1)",
    *(fault for fault in FAULTS if "(rank 0)" in fault),
    "SIGHUP (ssh is lost)",
}
GO_ON = (
    "is killed",
    "sleeps for ever",
    "sees",
    "Ctrl-C",
    "SIGTERM twice",
    "the launcher is killed",
)
"""One fault of each end: its run goes on to the bits of the whole one."""


@pytest.mark.parametrize(
    ("fault", "name"),
    [  # CI runs each of its faults in one recipe
        row(fault, name, in_ci=name == names[number % len(names)] and fault in IN_CI)
        for number, fault in enumerate(FAULTS)
        for names in [FAULTS[fault].recipes]
        for name in names
    ],
)
def test_a_rank(
    scene: Scene, wholes: dict[str, Result], rows: list[dict[str, Any]], fault: str, name: str
) -> None:
    expected, before = FAULTS[fault], shared_memory()
    more = expected.options if name in DDP else ()  # the toy has no loading processes
    options = (*nproc(name), *OPTIONS, *RECIPES[name], *more)
    command = scene.recipe.command(name, *options, "--timeout-s", str(TIMEOUT_S))
    # The toy's steps take 2 ms: two of them are too short for the snapshot of step 4.
    step_s = expected.step_s if name in DDP else max(expected.step_s, 0.1)
    env = {**scene.env, "STEP_S": str(step_s)}
    if expected.act is None:
        env |= {"FAULT": fault, "FAULT_STEP": str(expected.at)}
        env |= {"FAULT_RANK": str(expected.rank)}
    gate = scene.gate("5")
    if expected.act:
        env["GATES"] = str(gate.parent)
    process = scene.recipe.start(*command, env=env)
    if expected.act:
        wait_for(lambda: list(scene.folder.glob("snapshots/step_*4.*.pt")))
        start_s = time.monotonic()
        expected.act(process, scene.folder)
        gate.unlink()
    else:
        wait_for(lambda: scene.mark.exists() or process.poll() is not None)
        start_s = time.monotonic()
    result = scene.recipe.finish(process, scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    first = next(iter(result.errors), "")
    assert expected.act or scene.mark.exists(), "the fault has happened"
    assert result.status == expected.status, result.stderr
    assert expected.says or "Traceback" not in result.stderr
    assert len(result.errors) == (1 if expected.says else 0), result.stderr
    assert re.match(expected.says, first), result.stderr
    ended = {"status": SAID[expected.status]} | ({"error": first} if expected.status == 1 else {})
    assert json.loads((scene.folder / "status.json").read_text()) == ended
    left = shared_memory() - before
    wait_for(lambda: not left & shared_memory())  # another program's go at its end, a leak stays
    step = assert_intact(scene.folder)

    if fault.startswith(GO_ON):
        command = scene.recipe.command(name, *options)
        again = scene.recipe.finish(scene.recipe.start(*command), scene.folder).assert_ok()
        assert again.sha == wholes[name].sha
        assert again.losses == wholes[name].losses, "every step once"
    rows.append(
        {
            "fault": f"a rank {fault}" if expected.act is None else fault,
            "recipe": name,
            "seconds": elapsed_s,
            "status": result.status,
            "first_line": first,
            "resumed_from": step,
        }
    )


KILLS = {
    "once": [AT],
    "twice": [AT, 10],
    "at ten moments, a tenth of a step apart": list(range(6, 56, 5)),
}
"""The steps after which a rank is killed."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "name"),
    [
        row(kills, name, in_ci=(kills, name) == ("once", "ddp_spawn"))
        for kills in KILLS
        for name in DDP
    ],
)
def test_a_rank_is_killed_and_restarted(
    scene: Scene, recipe: Recipe, rows: list[dict[str, Any]], name: str, kills: str
) -> None:
    """One command, which ends with the bits of the run that lost nothing."""
    steps, options = KILLS[kills], (*nproc(name), *OPTIONS[2:], "--epochs", "4")
    whole = recipe(name, *options, folder="whole").assert_ok()
    command = scene.recipe.command(name, *options, "--restarts", str(len(steps)))
    env = {**scene.env, "KILLS": " ".join(map(str, steps))}
    result = scene.recipe.finish(scene.recipe.start(*command, env=env), scene.folder)
    scene.wait_until_gone(time.monotonic())
    result.assert_ok()
    assert len(list(scene.mark.parent.glob("mark*"))) == len(steps), "every fault has happened"
    assert (result.sha, result.losses) == (whole.sha, whole.losses)
    assert len(result.errors) == len(steps), result.stderr
    assert all("was killed by SIGKILL" in line for line in result.errors)
    found = re.findall(r"(?m)^restarted: lost (\S+) s, (steps done again: \d+)", result.stdout)
    assert len(found) == len(steps)
    rows.append(
        {
            "fault": f"a rank is killed {kills} (--restarts)",
            "recipe": name,
            "seconds": max(float(seconds) for seconds, _ in found),
            "status": result.status,
            "first_line": f"restarted: lost {found[0][0]} s, {found[0][1]}",
            "resumed_from": result.summary["resumed_from"],
        }
    )


@pytest.fixture
def quarter() -> Iterator[Callable[[int], object]]:
    """Limits a process to a quarter of the CPU time that it takes now, however busy the cores."""
    need_root()
    old = Path("/sys/fs/cgroup/cpu")  # cgroup v1
    group = (old if old.is_dir() else old.parent) / f"slow_{os.getpid()}"
    group.mkdir()

    def computed_s(process: int) -> float:
        user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def limit(process: int) -> None:
        before_s, begun_s = computed_s(process), time.monotonic()
        time.sleep(2)
        share = (computed_s(process) - before_s) / (time.monotonic() - begun_s)
        # A short period, so that each step has a pause. In the default one of 100,000 us, an idle
        # core takes some steps and then a long pause, which no median over the steps shows.
        period = 20_000  # us
        quota = max(1000, int(period * share / 4))
        if old.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        (group / "cgroup.procs").write_text(str(process))

    yield limit
    for process in (group / "cgroup.procs").read_text().split():  # of a test that failed
        with suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(process)
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


BEFORE = "by a sleep before the optimizer's step"


@pytest.mark.parametrize(
    "slowed",
    [row("by a sleep in each step"), row(BEFORE, in_ci=True), row("by a cgroup's limit (cpu.max)")],
)
def test_a_slow_rank(
    scene: Scene, rows: list[dict[str, Any]], quarter: Callable[[int], object], slowed: str
) -> None:
    """Rank 1 sleeps 0.14 s in each step, or gets a quarter of its CPU time from step 10 on.

    The run goes on until the rank is named.
    """
    sleeps, options = "sleep" in slowed, ("--epochs", "1000000", "--log-every", "10")
    most = () if sleeps else ("--snapshot-every", "10")
    env = {"STEP_S": "0.02", "SLOW_RANK": "1", "SLOW_S": "0.14"} if sleeps else {}
    env |= {"SLOW_BEFORE": "1"} if slowed == BEFORE else {}
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *options, *most)
    process = scene.recipe.start(*command, env={**scene.env, **env})
    start_s, before = time.monotonic(), 0
    if not sleeps:
        newest = wait_for(lambda: sorted(scene.folder.glob("snapshots/step_*.pt")))[-1]
        start_s, before = time.monotonic(), int(newest.name[5:13])
        quarter(ranks_of(process.pid)[1])
    assert process.stdout
    said = next((line.strip() for line in process.stdout if "computes" in line), "")
    elapsed_s = time.monotonic() - start_s
    assert re.match(rf"warning: rank 1 on {HERE} \(cpu\) computes \d+% longer per step", said)
    process.send_signal(signal.SIGTERM)
    assert scene.recipe.finish(process, scene.folder).status == 75
    curves = event_accumulator.EventAccumulator(str(scene.folder / "tensorboard"))
    found = [c for c in curves.Reload().Scalars("slow_rank_excess") if c.step > before]
    rows.append(
        {
            "fault": f"a rank is slowed {slowed}, found {found[-1].step - before} steps later",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 0,
            "resumed_from": 0,
            "first_line": said,
        }
    )


def test_the_launcher_is_asked_where_its_ranks_are(scene: Scene, wholes: dict[str, Result]) -> None:
    """The run goes on: its weights are the usual ones."""
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *OPTIONS)
    gate = scene.gate("5")
    process = scene.recipe.start(*command, env={**scene.env, "GATES": str(gate.parent)})
    wait_for(lambda: list(scene.folder.glob("snapshots/step_*4.*.pt")))
    process.send_signal(signal.SIGQUIT)
    assert process.stderr
    answered: set[str] = set()
    while answered != {"0", "1"}:
        line = process.stderr.readline()
        assert line, "the launcher has ended"
        found = re.findall(rf"^rank ([01]) on {HERE}, step \d+: it is at \S+ ", line)
        answered.update(found)
        if line.startswith("rank ") and not found:  # busy: it has not answered in time
            process.send_signal(signal.SIGQUIT)
    gate.unlink()
    result = scene.recipe.finish(process, scene.folder).assert_ok()
    assert result.sha == wholes["ddp_launch"].sha


@dataclass
class Hosts:
    """Two hosts with a cable between them."""

    names: list[str]

    def run(self, node: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def cable(self, state: str) -> None:
        """Pull it out (down) or put it back (up)."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "eth0", state], check=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    need("ip")
    with two_hosts() as names:
        yield Hosts(names)


def start_on_both(scene: Scene, hosts: Hosts, timeout_s: int = TIMEOUT_S, **env: str) -> list[Any]:
    """ddp_launch, one process per host."""
    return [
        scene.recipe.start(
            *hosts.run(
                node, *launched(scene.recipe, node, *OPTIONS, "--timeout-s", str(timeout_s))
            ),
            env={**scene.env, "STEP_S": "0.3", **env},
        )
        for node in (0, 1)
    ]


@pytest.mark.parametrize(
    "fault",
    [row("cut for good", in_ci=True), row("cut for 3 s", in_ci=True), row("rank 0's host gone")],
)
def test_the_network(
    scene: Scene, hosts: Hosts, wholes: dict[str, Result], rows: list[dict[str, Any]], fault: str
) -> None:
    # TCP retries at growing intervals: after 3 s without a cable, recovery may take 7 s.
    gate = scene.gate("5")
    timeout_s = 30 if fault == "cut for 3 s" else TIMEOUT_S
    processes = start_on_both(scene, hosts, timeout_s, GATES=str(gate.parent))
    wait_for(lambda: list(scene.folder.glob("snapshots/step_*4.*.pt")))
    start_s = time.monotonic()
    if fault == "rank 0's host gone":
        hosts.cable("down")  # no connection is closed
        os.killpg(processes[0].pid, signal.SIGKILL)
    else:
        hosts.cable("down")
    gate.unlink()
    if fault == "cut for 3 s":
        time.sleep(3)
        hosts.cable("up")
    results = [scene.recipe.finish(process, scene.folder) for process in processes]
    elapsed_s = scene.wait_until_gone(start_s)
    hosts.cable("up")
    first = next(iter(results[1].errors), "")
    if fault == "cut for 3 s":
        assert [result.status for result in results] == [0, 0]
    else:
        assert results[1].status == 1
        assert re.match(rf"error: rank 1 on {HERE}: Timed out .*the network.* is cut", first), first
        scene.mark.touch()
        assert_intact(scene.folder)
        for process in start_on_both(scene, hosts, STEP_S="0"):
            scene.recipe.finish(process, scene.folder).assert_ok()
    final = Result(0, "", "", scene.folder)
    assert final.sha == wholes["ddp_launch"].sha
    assert final.losses == wholes["ddp_launch"].losses
    rows.append(
        {
            "fault": f"the network: {fault}",
            "recipe": "ddp_launch, two hosts",
            "seconds": elapsed_s,
            "status": results[1].status,
            "first_line": first,
            "resumed_from": 4,
        }
    )


@pytest.mark.parametrize(
    "damage", [row("altered", in_ci=True), row("cut short"), row("of a newer version", in_ci=True)]
)
def test_a_snapshot(
    scene: Scene, begun: Path, wholes: dict[str, Result], rows: list[dict[str, Any]], damage: str
) -> None:
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *OPTIONS)
    shutil.copytree(begun, scene.folder)
    newest = snapshot_files.list_snapshots(scene.folder / "snapshots")[0]
    data = bytearray(newest.read_bytes())
    if damage == "of a newer version":
        content = torch.load(newest, weights_only=True)
        newest.unlink()
        snapshot_files.write(newest.parent, 9, {**content, "format": snapshot_files.FORMAT + 1})
    else:
        data[len(data) // 2] ^= 1
        newest.write_bytes(data if damage == "altered" else data[:-100])
    start_s = time.monotonic()
    result = scene.recipe.finish(scene.recipe.start(*command, env=scene.env), scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    first = next(
        line for line in (result.stdout + result.stderr).splitlines() if "step_00000009" in line
    )
    if damage == "of a newer version":
        assert (result.status, result.errors) == (2, [first])
        assert "use the version of the code that wrote it" in first
        assert not list(newest.parent.glob("*.unsound")), "nothing was set aside"
        step = 0
    else:
        result.assert_ok()
        assert "trying the snapshot before" in first
        assert result.sha == wholes["ddp_launch"].sha
        step = result.summary["resumed_from"]
        assert step == 8
    rows.append(
        {
            "fault": f"the newest snapshot is {damage}",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": result.status,
            "resumed_from": step,
            "first_line": first.replace(str(scene.folder), "RUN"),
        }
    )


FILES = {
    "metrics.jsonl is cut": (0, "metrics.jsonl was cut or altered after step_00000009"),
    "config.json is garbled": (2, "error: RUN/config.json is damaged"),
}


@pytest.mark.parametrize("fault", [row(fault, in_ci="metrics" in fault) for fault in FILES])
def test_a_file_of_the_run(
    scene: Scene, begun: Path, wholes: dict[str, Result], rows: list[dict[str, Any]], fault: str
) -> None:
    """CI causes the others without a run (tests/common/run/test_folder.py)."""
    status, says = FILES[fault]
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *OPTIONS)
    shutil.copytree(begun, scene.folder)
    file = scene.folder / fault.split()[0]
    before = file.read_bytes()
    file.write_bytes(before[: len(before) // 2] if status == 0 else before[::-1])
    start_s = time.monotonic()
    result = scene.recipe.finish(scene.recipe.start(*command, env=scene.env), scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    said = (result.stdout + result.stderr).replace(str(scene.folder), "RUN").splitlines()
    first = next(line for line in said if says in line)
    assert result.status == status, result.stderr
    step = 0
    if status == 0:
        step = result.summary["resumed_from"]
        assert step == 4, "the newest snapshot that counts on no lost line"
    else:
        assert len(result.errors) == 1
        file.write_bytes(before)
        scene.recipe.finish(scene.recipe.start(*command), scene.folder).assert_ok()
    final = Result(0, "", "", scene.folder)
    assert final.sha == wholes["ddp_launch"].sha
    assert final.losses == wholes["ddp_launch"].losses
    rows.append(
        {
            "fault": fault,
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": status,
            "resumed_from": step,
            "first_line": first,
        }
    )


def test_a_second_command_in_the_folder(
    scene: Scene, wholes: dict[str, Result], rows: list[dict[str, Any]]
) -> None:
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *OPTIONS)
    gate = scene.gate("5")
    first = scene.recipe.start(*command, env={**scene.env, "GATES": str(gate.parent)})
    wait_for(lambda: list(scene.folder.glob("snapshots/step_*4.*.pt")))
    start_s = time.monotonic()
    second = scene.recipe.finish(scene.recipe.start(*command), scene.folder)
    elapsed_s = time.monotonic() - start_s
    assert second.status == 2
    (said,) = second.errors
    assert re.search(rf"still going \(host {HERE}, process \d+\)", said), said
    gate.unlink()
    result = scene.recipe.finish(first, scene.folder).assert_ok()
    assert result.sha == wholes["ddp_launch"].sha
    assert result.losses == wholes["ddp_launch"].losses
    rows.append(
        {
            "fault": "the same command a second time, while the first one trains",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 2,
            "resumed_from": 0,
            "first_line": re.sub(r"process \d+", "process PID", said).replace(
                str(scene.folder), "RUN"
            ),
        }
    )


@pytest.mark.by_hand
def test_two_processes_with_the_same_rank(scene: Scene, rows: list[dict[str, Any]]) -> None:
    """Without our launcher; --timeout-s is 600 s. CI does it on two hosts."""
    port = str(free_port())
    start_s = time.monotonic()
    processes = []
    for rank in ("0", "1", "1"):
        env = {
            "RANK": rank,
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = scene.recipe.command("ddp_launch")
        processes.append(scene.recipe.start(*command, env={**scene.env, **env}))
    results = [scene.recipe.finish(process, scene.folder) for process in processes]
    elapsed_s = scene.wait_until_gone(start_s)
    assert [result.status for result in results] == [2, 2, 2]
    (first,) = (line for result in results for line in result.errors)
    assert "two processes are rank 1" in first
    assert not scene.folder.exists()
    rows.append(
        {
            "fault": "two processes say that they are the same rank",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 2,
            "resumed_from": 0,
            "first_line": first,
        }
    )


@pytest.mark.parametrize("workers", [row("0"), row("1", in_ci=True)])
def test_a_data_file_that_vanishes(scene: Scene, rows: list[dict[str, Any]], workers: str) -> None:
    root = flowers(scene.recipe.tmp_path / "data", per_class=20)
    options = [
        "--data",
        "imagefolder",
        "--data-path",
        str(root),
        *(
            "--image-size 16 --global-batch-size 4 --epochs 400 --snapshot-every 5 --num-workers"
        ).split(),
        workers,
    ]
    process = scene.recipe.start(*scene.recipe.command("ddp_launch", *options), env=scene.env)
    wait_for(lambda: list(scene.folder.glob("snapshots/step_*.pt")))
    for path in (root / "daisy").iterdir():
        path.unlink()
    start_s = time.monotonic()
    result = scene.recipe.finish(process, scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    assert result.status == 1
    (first,) = result.errors
    assert re.match(rf"error: rank [01] on {HERE}: cannot read .*daisy \d+\.jpg", first), first
    rows.append(
        {
            "fault": f"a data file vanishes (--num-workers {workers})",
            "status": 1,
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "first_line": first.replace(str(root), "DATA"),
            "resumed_from": assert_intact(scene.folder),
        }
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_data_that_stall(
    scene: Scene, wholes: dict[str, Result], rows: list[dict[str, Any]], workers: str
) -> None:
    """No rank gets a batch: nobody waits in a collective."""
    stalled = scene.recipe.tmp_path / "stalled"
    stalled.touch()
    options = (*nproc("ddp_launch"), *OPTIONS, "--num-workers", workers)
    command = scene.recipe.command("ddp_launch", *options)
    process = scene.recipe.start(
        *command, "--timeout-s", str(TIMEOUT_S), env={**scene.env, "STALLED": str(stalled)}
    )
    start_s = time.monotonic()
    result = scene.recipe.finish(process, scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    who = "it" if workers == "0" else r"its loading process \d+"
    line = rf"error: rank [01] on {HERE}: got no batch for {TIMEOUT_S} s: {who} is at \S+ \(stalled"
    assert (result.status, len(result.errors)) == (1, 1), result.stderr
    assert re.match(line, result.errors[0]), result.stderr
    stalled.unlink()
    again = scene.recipe.finish(scene.recipe.start(*command), scene.folder).assert_ok()
    assert (again.sha, again.losses) == (wholes["ddp_launch"].sha, wholes["ddp_launch"].losses)
    rows.append(
        {
            "fault": f"no rank gets a batch (--num-workers {workers})",
            "status": 1,
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "first_line": result.errors[0],
        }
    )


IMAGE = "a bit of an image flips"


@pytest.mark.parametrize("fault", [row(fault, in_ci=fault == IMAGE) for fault in (*DAMAGES, IMAGE)])
def test_packed_images(scene: Scene, rows: list[dict[str, Any]], fault: str) -> None:
    """CI causes the others without a run (tests/common/data/test_packed.py)."""
    folder = scene.recipe.tmp_path
    pack.pack(flowers(folder / "data", per_class=100), folder / "packed", 150_000, 0, 90)
    status, says = 2, "error: "
    if fault == IMAGE:  # in none of the 100 images that are read at the start
        tar = flip_image(folder / "packed", 7)
        status, says = 1, rf"error: rank \d on {HERE}: {tar}: sample 7 \(daisy/.*\) is damaged"
    else:
        damage, words = DAMAGES[fault]
        damage(folder / "packed")
        says = rf"error: .*{words}"
    options = ("--data", "packed", "--data-path", folder / "packed", "--image-size", "16")
    command = scene.recipe.command(
        "ddp_launch", *options, "--global-batch-size", "4", "--epochs", "2"
    )
    start_s = time.monotonic()
    result = scene.recipe.finish(scene.recipe.start(*command, env=scene.env), scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    assert result.status == status, result.stderr
    (first,) = result.errors
    assert re.match(says, first), first
    assert "Traceback" not in result.stderr
    rows.append(
        {
            "fault": f"packed images: {fault}",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": status,
            "resumed_from": 0,
            "first_line": first.replace(str(folder / "packed"), "PACKED"),
        }
    )


@pytest.mark.by_hand
@pytest.mark.parametrize("how", LOST)
def test_a_folder_that_is_lost(scene: Scene, rows: list[dict[str, Any]], how: str) -> None:
    """In the place of the folder, nothing is made or changed. CI: tests/common/test_owner.py."""
    lose, says = LOST[how]
    command = scene.recipe.command("ddp_launch", *nproc("ddp_launch"), *LONG)
    # It waits after the step of its first snapshot: no line or curve is half written.
    gate = scene.gate("7")
    process = scene.recipe.start(*command, env={**scene.env, "GATES": str(gate.parent)})
    wait_for(lambda: list(scene.folder.glob("snapshots/step_*.pt")))
    lose(scene.folder)
    left = {name: byte for name, byte in contents(scene.folder).items() if "logs/" not in name}
    gate.unlink()
    start_s = time.monotonic()
    result = scene.recipe.finish(process, scene.folder)
    elapsed_s = scene.wait_until_gone(start_s)
    assert result.status == 1, result.stderr
    (first,) = result.errors
    assert re.search(says, first), first
    assert "Traceback" not in result.stderr
    after = contents(scene.folder)
    assert {name: byte for name, byte in after.items() if "logs/" not in name} == left
    rows.append(
        {
            "fault": f"the run's folder is {how} while the run goes on",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 1,
            "resumed_from": 0,
            "first_line": first.replace(str(scene.folder.parent), "RUNS"),
        }
    )


def test_a_disk_that_fills(scene: Scene, rows: list[dict[str, Any]]) -> None:
    with small_disk(scene.folder, "2m") as disk:
        command = scene.recipe.command("ddp_launch", "--epochs", "6", "--keep-snapshots", "50")
        start_s = time.monotonic()
        process = scene.recipe.start(*command, env=scene.env)
        result = scene.recipe.finish(process, disk)
        elapsed_s = scene.wait_until_gone(start_s)
        assert result.status == 1
        (first,) = result.errors
        # whichever meets the end of the disk
        assert re.search(
            r"cannot write (a snapshot|\S+/best\.pt)\b.*No space left on device", first
        )
        step = assert_intact(disk)
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        again = scene.recipe.finish(scene.recipe.start(*command), disk).assert_ok()
        assert again.summary["resumed_from"] == step
    rows.append(
        {
            "fault": "the disk fills (from the start on)",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 1,
            "resumed_from": step,
            "first_line": first.replace(str(disk), "RUN"),
        }
    )


@pytest.mark.parametrize("workers", [row("0", in_ci=True), row("2")])
def test_a_disk_that_freezes(recipe: Recipe, rows: list[dict[str, Any]], workers: str) -> None:
    """Rank 0 waits where no signal reaches it, rank 1 for rank 0, and the launcher for both."""
    with disk_that_freezes(recipe.tmp_path / "disk") as disk:
        scene = Scene(recipe, disk / "run")
        options = (*nproc("ddp_launch"), *OPTIONS, "--num-workers", workers)
        command = recipe.command("ddp_launch", *options, folder="disk/run")
        gate = scene.gate("5")
        env = {**scene.env, "GATES": str(gate.parent)}
        process = recipe.start(*command, "--timeout-s", str(TIMEOUT_S), env=env)
        wait_for(lambda: list(scene.folder.glob("snapshots/step_*.pt")))
        subprocess.run(["fsfreeze", "--freeze", disk], check=True)
        gate.unlink()
        start_s = time.monotonic()
        try:
            process.wait(PATIENCE_S)
        finally:
            elapsed_s = time.monotonic() - start_s
            subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
        result = recipe.finish(process, scene.folder)
        assert (result.status, len(result.errors)) == (1, 1), result.stderr
        (first,) = result.errors
        stuck = r"stopped answering \(waiting for a disk or a network file system\)"
        assert re.match(rf"error: rank 0 on {HERE} {stuck}", first), first
        scene.wait_until_gone(start_s)
        step = assert_intact(scene.folder)
        again = recipe.finish(recipe.start(*command), scene.folder).assert_ok()
        assert again.summary["resumed_from"] == step
    rows.append(
        {
            "fault": f"the disk freezes (--num-workers {workers})",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 1,
            "resumed_from": step,
            "first_line": first.replace(str(disk), "DISK"),
        }
    )


@pytest.mark.parametrize("workers", [row("0"), row("2", in_ci=True)])
def test_a_tmpdir_with_a_long_name(scene: Scene, rows: list[dict[str, Any]], workers: str) -> None:
    """Too long for a socket of multiprocessing, by which loading processes hand over batches."""
    name = scene.recipe.tmp_path / ("t" * 76)
    name.mkdir()
    options = (*nproc("ddp_launch"), *OPTIONS, "--num-workers", workers, "--timeout-s")
    command = scene.recipe.command("ddp_launch", *options, str(TIMEOUT_S))
    start_s = time.monotonic()
    process = scene.recipe.start(*command, env={**scene.env, "TMPDIR": str(name)})
    scene.recipe.finish(process, scene.folder).assert_ok()
    elapsed_s = scene.wait_until_gone(start_s)
    rows.append(
        {
            "fault": f"TMPDIR has a long name (--num-workers {workers})",
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 0,
            "resumed_from": 0,
            "first_line": "",
        }
    )


@pytest.mark.parametrize(
    "fault", [row("rank 0's port is taken", in_ci=True), row("rank 0's host has no such name")]
)
def test_an_address_that_cannot_work(scene: Scene, rows: list[dict[str, Any]], fault: str) -> None:
    """Without our launcher, as under srun; rank 1 must not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        address = "127.0.0.1" if "port" in fault else "no-such-host.invalid"
        start_s = time.monotonic()
        processes = []
        for rank in ("0", "1"):
            env = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            command = scene.recipe.command("ddp_launch", "--timeout-s", "3")
            processes.append(scene.recipe.start(*command, env={**scene.env, **env}))
        results = [scene.recipe.finish(process, scene.folder) for process in processes]
        elapsed_s = scene.wait_until_gone(start_s)
    first = results[0].errors[0]
    assert results[0].status == 2
    if "port" in fault:
        assert f"port {port} on {socket.gethostname()} cannot be taken" in first
        assert results[1].status == 1
        assert "not all 2 ranks met at 127.0.0.1" in results[1].errors[0]
    else:
        assert "'no-such-host.invalid' does not resolve" in first
    rows.append(
        {
            "fault": fault,
            "recipe": "ddp_launch",
            "seconds": elapsed_s,
            "status": 2,
            "resumed_from": 0,
            "first_line": first.replace(port, "PORT"),
        }
    )


def test_torchrun_shows_the_first_failure(scene: Scene) -> None:
    process = scene.recipe.start(
        sys.executable,
        *(
            f"-m torch.distributed.run --nproc-per-node 2 --master-port {free_port()} -m "
            "recipes.ddp_launch.train"
        ).split(),
        *OPTIONS,
        "--output-dir",
        scene.folder,
        env={**scene.env, "FAULT": "raises", "FAULT_STEP": str(AT)},
    )
    result = scene.recipe.finish(process, scene.folder)
    assert result.status == 1
    _, root_cause = result.stderr.split("Root Cause (first observed failure):")
    assert re.search(r"rank +: 1 .*RuntimeError: a bug of this test", root_cause, re.DOTALL)
