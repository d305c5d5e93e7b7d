"""Text as bytes: windows of a text, and how well a model that counts pairs predicts it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common import log
from common.data.datasets import Data, LoaderOptions
from common.data.stream import Key, Samples
from common.errors import InputError
from common.group.collectives import agreed
from common.option_rules import may_change, refuse_below

VOCABULARY = 256
"""A token is a byte of UTF-8: every text has tokens, and no list of them must be kept."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(LoaderOptions):
    """The text to learn; its last tenth is held out for validation."""

    num_workers: int | Literal["auto"] | None = may_change(None)
    """Loading processes per rank [processes]; None or 0: the training process loads.
    auto: measured at the start, and remembered in the run's folder."""
    data: Literal["pydoc", "text"] = "pydoc"
    """Text. pydoc: the language reference inside this Python, about 465,000 characters.
    It differs between versions of Python. text: UTF-8 in --data-path."""
    data_path: Path | None = may_change(None)
    """text: a file, or a folder whose files are read in the order of their names."""
    context: int = 128
    """Length of a sample [bytes]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data == "text") != (self.data_path is not None):
            raise ValueError("--data text and --data-path FILE_OR_FOLDER belong together")
        refuse_below(self, context=1)


class Windows(Samples):
    """Parts of a text: `context` bytes, and for each byte the next one as the target.

    Args:
        text: (bytes,), uint8.
        context: length of a window [bytes].
        seed: with the epoch and the sample's index, decides where a window begins. None: windows
            follow each other without gaps, so that each target occurs once.
    """

    def __init__(self, text: Tensor, context: int, seed: int | None) -> None:
        super().__init__(text, range((len(text) - 1) // context), seed or 0)
        self.context, self.random = context, seed is not None

    def __getitems__(self, keys: Sequence[Key]) -> list[Tensor]:
        """Tokens and targets (samples, context) of a batch of one epoch, int64."""
        places = len(self.source) - self.context
        starts: NDArray[np.int64] = np.array([index * self.context for _, index in keys])
        if self.random:  # 2^64 is no multiple of `places`, which changes a probability by 10^-13
            starts = (self.seeds_of(keys) % np.uint64(places)).astype(np.int64)
        windows = self.source.unfold(0, self.context + 1, 1)[starts].long()
        return [windows[:, :-1], windows[:, 1:]]


@dataclass(frozen=True)
class Text:
    """A text, ready to train on."""

    data: Data
    bytes_per_character: float
    """Of the held-out text."""
    bigram_bits: float
    """Bits per character with which `bigram_bits_per_byte` predicts the held-out windows."""

    def score(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The mean cross-entropy of each window [nats per byte], also as bits per character."""
        tokens, targets = batch
        logits = model(tokens).double().transpose(1, 2)
        losses = cross_entropy(logits, targets, reduction="none").mean(1)
        return {
            "loss": losses,
            "bits_per_character": losses / math.log(2) * self.bytes_per_character,
        }


def load_text(options: TextOptions, seed: int) -> Text:
    """`read_text` on every rank; an error on one rank is raised on all. A collective."""
    with agreed():
        return read_text(options, seed)


def read_text(options: TextOptions, seed: int) -> Text:
    """Read and split the text.

    Raises:
        InputError: no text, a file that is not UTF-8, or less than some windows of text.
    """
    encoded = b"\n".join(map(_read, _files(options))) if options.data_path else _pydoc()
    cut = len(encoded) * 9 // 10
    if min(cut, len(encoded) - cut) < options.context + 2:
        raise InputError(
            f"the text has {len(encoded):,} bytes: give at least {10 * options.context + 30:,} "
            f"for --context {options.context}, of which a tenth is held out"
        )
    fingerprint = hashlib.sha256(encoded).hexdigest()
    log.info(f"{options.data}: {len(encoded):,} bytes, SHA-256 {fingerprint[:16]}...")
    text = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    train, val = (
        Windows(text[:cut], options.context, seed),
        Windows(text[cut:], options.context, None),
    )
    ratio = (len(encoded) - cut) / len(encoded[cut:].decode(errors="ignore"))
    data = Data(train, val, fingerprint)
    return Text(data, ratio, ratio * bigram_bits_per_byte(train.source, val))


def _pydoc() -> bytes:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "".join(topics.values()).encode()


def _files(options: TextOptions) -> list[Path]:
    path = options.data_path
    assert path is not None
    if path.is_file():
        return [path]
    found = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
    if not found:
        raise InputError(f"--data-path {path} is neither a file nor a folder with files")
    return found


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable UTF-8 text: {error}") from error
    return content


def bigram_bits_per_byte(train: Tensor, val: Windows) -> float:
    """How a table of pairs predicts the held-out windows [bits]: counts in `train`, plus 0.1."""
    pairs = torch.full((VOCABULARY, VOCABULARY), 0.1, dtype=torch.float64)
    places = train[:-1].long() * VOCABULARY + train[1:].long()
    pairs += torch.bincount(places, minlength=VOCABULARY**2).view_as(pairs)
    bits = -(pairs / pairs.sum(1, keepdim=True)).log2()
    tokens, targets = val.__getitems__([(0, index) for index in range(len(val))])
    return float(bits[tokens, targets].mean())
