"""Write text with a model that fsdp trained.

    python -m recipes sample RUN --prompt "The with statement"

RUN is the folder of a finished run. Its model.pt is loaded whole, on a CPU, and computes in as many
threads as the training did. Each byte is shown as it comes.

After the default training (0.4 million parameters, 1.9 bits per character), expect the look of
Python's language reference: mostly real words, quoted names and markup, in sentences without sense.
"""

import codecs
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.errors import InputError
from common.launch.report import say
from common.parse import given_path
from common.run.options import RunOptions
from common.seeds import set_determinism
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.text import VOCABULARY, TextOptions
from tools.command import Parser, attempt
from tools.recorded import options_of, read_summary
from tools.trained import load_all, read_config, refuse_altered, refuse_unfinished


def load(run: Path) -> tuple[Transformer, int, dict[str, Any]]:
    """The model of a run, the length of its context [bytes], and its summary.

    From now on this process computes with the run's kernels and number of threads.

    Raises:
        InputError: no finished run of fsdp, or a damaged one.
    """
    config = read_config(run)
    if config["recipe"] != "fsdp":
        raise InputError(f"{run} is a run of {config['recipe']}: only models of fsdp write text")
    refuse_unfinished(run)
    set_determinism(**options_of(run, config, RunOptions).determinism)  # before any tensor
    weights, text = run / "model.pt", options_of(run, config, TextOptions)
    model = Transformer(options_of(run, config, TransformerOptions), VOCABULARY)
    summary = read_summary(run)
    refuse_altered(weights, run, summary)
    load_all(model, weights, "the transformer", f"{run}/config.json")
    return model.eval(), text.context, summary


@torch.no_grad()
def write(
    model: nn.Module, prompt: str, length: int, context: int, temperature: float, seed: int
) -> Iterator[str]:
    """The prompt, and `length` more bytes as they come, drawn from the model's prediction.

    A character of several bytes comes with its last one; bytes that form none are replaced.
    """
    generator = torch.Generator().manual_seed(seed)
    text, decoder = list(prompt.encode()), codecs.getincrementaldecoder("utf-8")("replace")
    yield prompt
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]
        chances = (logits / temperature).softmax(0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
        yield decoder.decode(bytes(text[-1:]))
    yield decoder.decode(b"", final=True)


def sample(arguments: Sequence[str]) -> None:
    """Print a text, as a command line says.

    Raises:
        InputError: something on the command line is wrong.
    """
    parser = Parser("sample", __doc__)
    parser.add_argument("run", type=given_path, metavar="RUN", help="folder of the run")
    parser.add_argument("--prompt", default="The ", help="beginning of the text (default 'The ')")
    parser.add_argument(
        "--length", type=int, default=400, help="bytes after the prompt [bytes] (default 400)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="below 1: likely bytes become likelier (default 0.8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, another text (default 0)"
    )
    given = parser.parse_args(list(arguments))
    if not given.prompt or given.length < 1 or not 0 < given.temperature < 100 or given.seed < 0:
        raise InputError(
            "--prompt must not be empty, --length must be at least 1, --temperature above 0 and "
            "below 100, --seed at least 0"
        )
    model, context, summary = load(given.run)
    own, pairs = (summary.get(f"{name}_bits_per_character") for name in ("val", "bigram"))
    if own and pairs:
        said = "bits per character on the held-out text: "
        say(f"{said}{own:.2f}; a table of pairs of bytes has {pairs:.2f}")
    asked = (given.prompt, given.length, context, given.temperature, given.seed)
    for piece in write(model, *asked):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    return attempt(lambda: sample(arguments))
