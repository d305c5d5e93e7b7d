"""How Slurm writes the nodes of a step and the tasks on each."""

import re


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `2(x3),1` to `[2, 2, 2, 1]`, tasks by node."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, where rank 0 runs: `gpu[07-12,20],x` gives `gpu07`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at commas outside brackets
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
