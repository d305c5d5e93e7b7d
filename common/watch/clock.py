"""Where a rank's time goes: waiting for data, computing, waiting for other ranks, saving ...

Each moment belongs to one kind, until the rank turns to the next. On a GPU, the GPU's own time is
measured: events are put into its queue, and read once it has passed them, so no step waits for
them. There, time counts as waiting for data only while the GPU has nothing to compute.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

KINDS = ("start", "data", "compute", "communication", "save", "evaluate", "other")
"""`start` ends with the first step, which connects the ranks, compiles and allocates.

`communication` is the time that was not hidden behind computing, with the wait for slower ranks. It
is measured in DDP; elsewhere `compute` has it. `other` is what Loop does between two steps.
"""

STEP = ("data", "compute", "communication")
"""What a step consists of."""


class Clock:
    """Adds up the time that this rank spends on each of `KINDS`."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices
        self._marks: deque[tuple[str, list[Any], bool]] = deque()
        self._done_s = [0.0] * len(devices)
        self._total_s = dict.fromkeys(KINDS, 0.0)
        self._step_s = dict.fromkeys(KINDS, 0.0)
        self._stepped = self._loads = False
        self.on_step: Callable[[Mapping[str, float]], None] = lambda _: None
        """Gets the seconds of each kind in a step, once they are known."""
        self.on_kind: Callable[[str], None] | None = None
        """Is told each kind when it begins."""
        self._mark("start")

    def turn_to(self, kind: str) -> None:
        """From now on time is of this kind; until the first step has ended it is `start`."""
        if self._stepped:
            self._mark(kind)
            if self.on_kind:
                self.on_kind(kind)

    def begin_step(self) -> None:
        """From now on this rank waits for data; it computes if nothing calls `end_load`."""
        self.turn_to("data" if self._loads else "compute")

    def end_load(self) -> None:
        """The step's batch is there: from now on this rank computes."""
        self._loads = True
        self.turn_to("compute")

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Within it this rank waits for others and does not compute."""
        before = self._marks[-1][0]
        self.turn_to("communication")
        yield
        self.turn_to(before)

    def end_wait(self) -> None:
        """If this rank waited for others, it computes from now on."""
        if self._marks[-1][0] == "communication":
            self.turn_to("compute")

    def end_step(self) -> None:
        """A step has ended: what follows is `other`."""
        self._mark("other", ends_step=self._stepped)
        self._stepped = True
        self._read()

    def seconds(self) -> Tensor:
        """The time of each of `KINDS` so far [s]."""
        self._mark(self._marks[-1][0])
        if self._devices[0].type == "cuda":
            for event in self._marks[-1][1]:
                event.synchronize()  # whoever asks waits for the GPUs anyway
        self._read()
        return torch.tensor([*self._total_s.values()], dtype=torch.float64)

    def _mark(self, kind: str, *, ends_step: bool = False) -> None:
        self._marks.append((kind, list(map(_now, self._devices)), ends_step))

    def _read(self) -> None:
        """Add up what has passed. A model on several GPUs is as far as the last of them is."""
        marks, gpu = self._marks, self._devices[0].type == "cuda"
        while len(marks) > 1 and (not gpu or all(event.query() for event in marks[1][1])):
            kind, since, _ = marks.popleft()
            _, until, ends_step = marks[0]
            before_s = max(self._done_s)
            for number, (a, b) in enumerate(zip(since, until, strict=True)):
                self._done_s[number] += a.elapsed_time(b) / 1000 if gpu else b - a
            spent_s = max(self._done_s) - before_s
            self._total_s[kind] += spent_s
            self._step_s[kind] += spent_s
            if ends_step:
                self.on_step(self._step_s)
            if ends_step or kind not in STEP:
                self._step_s = dict.fromkeys(KINDS, 0.0)


def _now(device: torch.device) -> Any:
    """The time on a CPU [s]; on a GPU an event that will have it."""
    if device.type == "cpu":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def shares(seconds: Tensor) -> dict[str, list[float]]:
    """Each kind's share of each rank's time, from `Clock.seconds` of all ranks (ranks, KINDS).

    `start` and `communication` are left out where there were none.
    """
    parts = (seconds / seconds.sum(dim=1, keepdim=True).clamp(min=1e-9)).T.round(decimals=4)
    found = dict(zip(KINDS, parts.tolist(), strict=True))
    return {
        kind: own
        for kind, own in found.items()
        if any(own) or kind not in ("start", "communication")
    }


def in_words(spent_s: Mapping[str, Sequence[float]]) -> str:
    """Each kind's share for a person, the largest first: the ranks' mean, or the least and most.

    Args:
        spent_s: kind to the seconds of each rank.
    """
    all_s = [max(sum(own), 1e-9) for own in zip(*spent_s.values(), strict=True)]
    said = []
    for kind, own_s in spent_s.items():
        own = [s / of for s, of in zip(own_s, all_s, strict=True)]
        mean, alike = sum(own) / len(own), max(own) - min(own) < 0.03
        shown = f"{mean:.0%}" if alike else f"{min(own):.0%} to {max(own):.0%}"
        said.append((mean, f"{kind} {shown}"))
    said.sort(key=lambda pair: -pair[0])
    return ", ".join(words for mean, words in said if mean > 0.005)
