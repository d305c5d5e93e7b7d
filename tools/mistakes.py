"""Where a classifier errs: accuracy per class, confusions, the worst mistakes (`evaluate`).

Every rank keeps its answers, and rank 0 gets all of them: each sample once, as in the metrics. So
tables and files are the same on any number of ranks.
"""

import json
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.data.packed import PackedImages
from common.data.stream import FixedBatches, Samples
from common.errors import InputError
from common.figure import save_figure
from common.group.collectives import gather_to_rank_0
from common.masking import printable
from common.training.evaluation import Scores, score_logits
from common.writing import write_bytes

SHOWN = 20
"""Classes up to which the whole confusion matrix is shown; else so many confusions are."""

COLUMNS = 6
WORST = COLUMNS**2
"""Pictures on the sheet."""


class Answers:
    """`score_classes` that also keeps what the model answered to each sample of this rank.

    Args:
        keys: of the batches, in the order in which they will come.
    """

    def __init__(self, keys: FixedBatches) -> None:
        self._keys = iter(keys)
        self._classes = 0
        self._rows = [np.empty((0, 4))]
        """Place of the sample, true class, predicted class and its probability; by batch."""

    def __call__(self, model: nn.Module, batch: Any) -> Scores:
        """As `score_classes`, and with its errors."""
        inputs, labels = batch
        logits = model(inputs)
        scores = score_logits(logits, labels)
        predicted = logits.argmax(1)
        chances = logits.double().softmax(1).gather(1, predicted[:, None])[:, 0]
        places = [place for _, place in next(self._keys)]
        columns = (labels.tolist(), predicted.tolist(), chances.tolist())
        self._rows.append(np.array((places, *columns)).T)
        self._classes = logits.shape[1]
        return scores

    def gathered(self, names: Sequence[str]) -> "Result | None":
        """The answers of all ranks; None on ranks other than 0. A collective.

        Args:
            names: of the classes; a class without a name is called by its index.
        """
        found = gather_to_rank_0((self._classes, np.concatenate(self._rows)))
        if not found:
            return None
        count = max(classes for classes, _ in found)
        rows = np.concatenate([rows for _, rows in found])
        rows = rows[rows[:, 0].argsort()]  # each place once: samples are not padded
        named = [*names[:count], *map(str, range(len(names), count))]
        return Result(named, rows[:, 1].astype(int), rows[:, 2].astype(int), rows[:, 3])


@dataclass(frozen=True)
class Result:
    """What a classifier answered to all samples, in their order."""

    names: list[str]
    """Of the classes, by index."""
    true: NDArray[np.int64]
    predicted: NDArray[np.int64]
    """(samples,), indices of classes."""
    probability: NDArray[np.float64]
    """(samples,), of the predicted class."""

    @property
    def wrong(self) -> NDArray[np.int64]:
        """Places of the wrong answers, the most confident first; equal ones in their order."""
        places = np.flatnonzero(self.true != self.predicted)
        return places[np.argsort(-self.probability[places], kind="stable")]

    @property
    def by_class(self) -> list[dict[str, Any]]:
        """Of each class its name, samples, correct ones and accuracy (None without samples)."""
        number = len(self.names)
        counts = np.bincount(self.true, minlength=number).tolist()
        right = np.bincount(self.true[self.true == self.predicted], minlength=number).tolist()
        return [
            {"class": name, "count": n, "correct": k, "accuracy": k / n if n else None}
            for name, n, k in zip(self.names, counts, right, strict=True)
        ]

    @property
    def matrix(self) -> NDArray[np.int64]:
        """(classes, classes), samples by true class (rows) and predicted class (columns)."""
        number = len(self.names)
        cells = np.bincount(self.true * number + self.predicted, minlength=number**2)
        return cells.reshape(number, number)

    @property
    def confusions(self) -> list[tuple[int, int, int]]:
        """The most frequent ones: samples, true class, predicted class; ties by class."""
        wrong = self.wrong
        pairs = self.true[wrong] * len(self.names) + self.predicted[wrong]
        cells, counts = np.unique(pairs, return_counts=True)
        first = np.argsort(-counts, kind="stable")[:SHOWN]
        return [(int(counts[n]), *divmod(int(cells[n]), len(self.names))) for n in first]

    @property
    def content(self) -> dict[str, Any]:
        """For --json: all classes, and the matrix; with many classes, the confusions instead."""
        if len(self.names) <= SHOWN:
            return {"classes": self.by_class, "confusion": self.matrix.tolist()}
        pairs = [
            {"class": self.names[true], "predicted": self.names[predicted], "count": count}
            for count, true, predicted in self.confusions
        ]
        return {"classes": self.by_class, "confusions": pairs}

    def lines(self) -> Iterator[str]:
        """A table for the terminal: rows are true classes, numbered columns predicted ones."""
        labels = [
            n if n == str(i) else f"{i} {n}" for i, n in enumerate(map(printable, self.names))
        ]
        many = len(labels) > SHOWN
        wide = max(5, *map(len, labels))
        cell = max(3, len(str(len(self.true))) + 1)
        heads = "" if many else "".join(f"{n:>{cell}}" for n in range(len(labels)))
        yield f"  {'class':<{wide}}  samples  accuracy" + (f"  predicted{heads}" if heads else "")
        rows = list(enumerate(self.by_class))
        if many:  # the stable sort keeps equal classes in their order
            known = [row for row in rows if row[1]["count"]]
            rows = sorted(known, key=lambda row: row[1]["accuracy"])[:SHOWN]
        for index, row in rows:
            accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
            cells = [] if many else self.matrix[index].tolist()
            shown = "".join(f"{count or '.':>{cell}}" for count in cells)
            line = f"  {labels[index]:<{wide}}  {row['count']:>7}  {accuracy:>8}"
            yield line + (f"           {shown}" if shown else "")
        if many:
            yield f"  (the {len(rows)} classes of the lowest accuracy; --json has all)\n"
            yield "  samples  confused: class, then predicted class"
            for count, true, predicted in self.confusions:
                yield f"  {count:>7}  {labels[true]}, {labels[predicted]}"

    def write_mistakes(self, path: Path, samples: Samples) -> None:
        """Write an object per wrong answer: file or sample, class, predicted class, probability.

        Raises:
            TrainingError: the file cannot be written.
        """
        lines = []
        for place in self.wrong.tolist():
            entry = {
                **name_of(samples, place),
                "class": self.names[self.true[place]],
                "predicted": self.names[self.predicted[place]],
                "probability": float(self.probability[place]),
            }
            lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        write_bytes(path, "".join(lines).encode("utf-8", "backslashreplace"))

    def draw(self, path: Path, weights_sha256: str) -> None:
        """Draw the matrix, or with many classes the most frequent confusions, as a PNG."""
        names = [textwrap.shorten(printable(n), 24, placeholder="...") for n in self.names]
        accuracy = float((self.true == self.predicted).mean())
        title = f"{accuracy:.4f} of {len(self.true)} samples, weights {weights_sha256[:8]}"

        def matrix(axes: Any) -> None:
            counts = self.matrix
            shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
            axes.grid(visible=False)
            axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
            for (row, column), count in np.ndenumerate(counts):
                colour = "white" if shares[row, column] > 0.5 else "black"
                if count:
                    axes.text(column, row, count, ha="center", va="center", size=8, color=colour)
            axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
            axes.set_yticks(range(len(names)), names, parse_math=False)
            axes.set(xlabel="predicted class", ylabel="class", title=title)
            axes.figure.set_size_inches(*[3 + 0.4 * len(names)] * 2)

        def bars(axes: Any) -> None:
            found = self.confusions[::-1]
            axes.barh(range(len(found)), [count for count, *_ in found])
            labels = [f"{names[true]}, not {names[other]}" for _, true, other in found]
            axes.set_yticks(range(len(found)), labels, parse_math=False)
            axes.set(xlabel="samples", title=title)
            axes.figure.set_size_inches(8, 6)

        _save(path, matrix if len(names) <= SHOWN else bars)

    def draw_worst(self, path: Path, samples: Samples) -> None:
        """Draw the most confident mistakes as one PNG, numbered as in mistakes.jsonl."""
        worst = self.wrong[:WORST].tolist()

        def tiles(axes: Any) -> None:
            rows = -(-len(worst) // COLUMNS)
            for number, place in enumerate(worst):
                row, column = divmod(number, COLUMNS)
                pixels, top = picture(samples, place).permute(1, 2, 0).numpy(), rows - row
                axes.imshow(
                    pixels.repeat(3 // pixels.shape[2], 2),
                    extent=(column + 0.05, column + 0.95, top - 0.7, top),
                )
                true, other = (
                    textwrap.shorten(printable(self.names[n[place]]), 20, placeholder="...")
                    for n in (self.true, self.predicted)
                )
                chance = self.probability[place]
                words = f"{number + 1}: {true}\ntaken for {other} ({chance:.2f})"
                axes.text(column + 0.05, top - 0.73, words, va="top", size=8, parse_math=False)
            axes.set(xlim=(0, COLUMNS), ylim=(0, rows), aspect="auto")
            axes.axis("off")
            axes.figure.set_size_inches(2 * COLUMNS, 2 * 9 / 7 * rows)

        if worst:
            _save(path, tiles)


def _save(path: Path, plot: Any) -> None:
    with warnings.catch_warnings():  # of letters that matplotlib's font has not
        warnings.simplefilter("ignore", UserWarning)
        save_figure(path, plot)


def name_of(samples: Samples, place: int) -> dict[str, Any]:
    """What a sample is called: its `file`, or its index in the source as `sample`.

    Args:
        samples: that were evaluated. A source with `files` (as photos) or `samples` (torchvision's
            ImageFolder) that begin with a path gives files.
        place: of the sample among them.
    """
    source, index = samples.source, int(samples.indices[place])
    if isinstance(source, PackedImages):
        return {"file": source.pack.listing.names[index]}
    entries = getattr(source, "files", getattr(source, "samples", None))
    entry = entries[index] if isinstance(entries, Sequence) else None
    if isinstance(entry, tuple) and isinstance(entry[0], str | Path):
        return {"file": str(entry[0])}
    return {"sample": index}


def picture(samples: Samples, place: int) -> Tensor:
    """A sample's image (channels, height, width), from 0 to 1, as the model sees it.

    Raises:
        InputError: its first tensor is no image of one or three channels.
    """
    first = next((p for p in tree_leaves(samples[0, place]) if isinstance(p, Tensor)), None)
    if first is None or first.ndim != 3 or len(first) not in (1, 3):
        shape = None if first is None else tuple(first.shape)
        raise InputError(
            f"--sheet shows images, and a sample's first tensor has the shape {shape}, not "
            "(1 or 3, height, width): leave --sheet out"
        )
    if first.dtype == torch.uint8:
        return first / 255
    low, high = first.min(), first.max()
    return (first.float() - low) / max(float(high - low), 1e-12)
