"""Two hosts: network namespaces, each with its own address and loopback."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.commands import Recipe, Result, wait_for
from tests.helpers.hosts import ADDRESSES, launched, limit, meeting, two_hosts

OPTIONS = ("--epochs", "2", "--log-every", "5")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[list[str]]]:
    """For each host, the words that run a command on it."""
    with two_hosts() as names:
        yield [["ip", "netns", "exec", name] for name in names]


def on_both(
    recipe: Recipe,
    hosts: list[list[str]],
    *options: str,
    address: str = ADDRESSES[0],
    node_ranks: tuple[int, int] = (0, 1),
) -> list[Result]:
    """Start ddp_launch by hand on both hosts, with the same options or with those of each host."""
    processes = []
    for node, host in zip(node_ranks, hosts, strict=True):
        extra = options[node].split() if len(options) == 2 else []
        command = launched(recipe, node, *OPTIONS, *extra, address=address)
        processes.append(recipe.start(*host, *command))
    return [recipe.finish(process, recipe.tmp_path / "run") for process in processes]


@pytest.mark.slow
def test_by_hand_and_by_torchrun(recipe: Recipe, hosts: list[list[str]]) -> None:
    """By hand, the weights are those of one host (tests/faults/test_matrix.py)."""
    first, second = on_both(recipe, hosts)
    second.assert_ok()
    by_hand = first.assert_ok().sha
    assert "world_size 2" in first.stdout
    assert second.stdout == "", "only rank 0 talks"
    processes = [
        recipe.start(
            *host,
            sys.executable,
            *"-m torch.distributed.run --nproc-per-node 1".split(),
            *meeting(node),
            "-m",
            "recipes.ddp_launch.train",
            *OPTIONS,
            "--output-dir",
            recipe.tmp_path / "torchrun",
        )
        for node, host in enumerate(hosts)
    ]
    for process in processes:
        result = recipe.finish(process, recipe.tmp_path / "torchrun").assert_ok()
    assert result.sha == by_hand


@pytest.mark.slow
def test_loopback_as_the_master_address_is_named(recipe: Recipe, hosts: list[list[str]]) -> None:
    for result in on_both(recipe, hosts, address="127.0.0.1"):
        assert result.status == 2
        assert len(result.errors) == 1, result.stderr
        assert re.search("127.0.0.1' is every host's own loopback", result.errors[0])


@pytest.mark.slow
def test_hosts_started_differently_do_not_train(recipe: Recipe, hosts: list[list[str]]) -> None:
    for result in on_both(recipe, hosts, "--lr 0.1", "--lr 0.2"):
        assert result.status == 2
        assert re.search(r"rank 1: not started like rank 0: lr 0\.1 there, 0\.2", result.stderr)


@pytest.mark.slow
def test_two_hosts_with_one_node_rank(recipe: Recipe, hosts: list[list[str]]) -> None:
    for result in on_both(recipe, hosts, node_ranks=(0, 0)):
        assert result.status == 2, result.stderr
        assert "two processes are rank 0" in result.stderr
        assert "give each host its own --node-rank" in result.stderr


def listening(host: list[str]) -> set[str]:
    """Addresses (hexadecimal, as in proc(5)) on which a host listens."""
    command = [*host, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in said.splitlines() if not line.lstrip().startswith("sl")]
    return {words[1].split(":")[0] for words in lines if words[3] == "0A"}


@pytest.mark.slow
def test_nothing_listens_on_every_interface(recipe: Recipe, hosts: list[list[str]]) -> None:
    """Neither the store, which has no authentication, nor the ranks' own sockets."""
    for node, host in enumerate(hosts):
        recipe.start(*host, *launched(recipe, node, "--epochs", "100000"))
    wait_for(lambda: list((recipe.tmp_path / "run").glob("snapshots/*.pt")))
    for address, host in zip(ADDRESSES, hosts, strict=True):
        own = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
        assert listening(host) == {own}


@pytest.mark.slow
def test_a_slow_link_is_time_of_communication(recipe: Recipe, hosts: list[list[str]]) -> None:
    """Each step waits until its gradients have crossed the link, once in each direction.

    Nothing is said of the other kinds of time: on a busy machine they may grow by anything.
    """
    bits_per_s, steps = 2e6, 20
    names = [host[-1] for host in hosts]
    limit(names, bits_per_s)
    try:
        first, second = on_both(recipe, hosts, *[f"--max-steps {steps + 1}"] * 2)
    finally:
        limit(names, None)
    second.assert_ok()
    spent_s = first.assert_ok().summary["time_s"]
    weights = torch.load(recipe.tmp_path / "run/model.pt", weights_only=True)
    sent_bits = steps * 8 * sum(value.nbytes for value in weights.values())
    assert min(spent_s["communication"]) > 0.9 * sent_bits / bits_per_s, spent_s
