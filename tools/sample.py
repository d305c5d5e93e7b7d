"""Write text with a model that fsdp trained.

    python -m recipes sample RUN --prompt "The with statement"

RUN is the folder of a finished run. Its model.pt is loaded whole, on a CPU.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from common.errors import InputError
from common.parse import given_path
from recipes.fsdp.model import Transformer, TransformerOptions
from recipes.fsdp.text import VOCABULARY, TextOptions
from tools.command import Parser, attempt
from tools.recorded import options_of, read_summary
from tools.trained import load_all, read_config, refuse_altered, refuse_unfinished


def load(run: Path) -> tuple[Transformer, int]:
    """The model of a run, and the length of its context [bytes].

    Raises:
        InputError: no finished run of fsdp, or a damaged one.
    """
    config = read_config(run)
    if config["recipe"] != "fsdp":
        raise InputError(f"{run} is a run of {config['recipe']}: only models of fsdp write text")
    refuse_unfinished(run)
    weights, text = run / "model.pt", options_of(run, config, TextOptions)
    model = Transformer(options_of(run, config, TransformerOptions), VOCABULARY)
    refuse_altered(weights, run, read_summary(run))
    load_all(model, weights, "the transformer", f"{run}/config.json")
    return model.eval(), text.context


@torch.no_grad()
def write(
    model: Transformer, prompt: str, length: int, context: int, temperature: float, seed: int
) -> str:
    """The prompt and `length` more bytes, each drawn from the model's prediction."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]
        chances = (logits / temperature).softmax(0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


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
    model, context = load(given.run)
    print(write(model, given.prompt, given.length, context, given.temperature, given.seed))


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    return attempt(lambda: sample(arguments))
