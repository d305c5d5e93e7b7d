"""`sample` shows each byte as it comes, and computes in the training's number of threads."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.commands import clean_env
from tests.helpers.pool import Pool, call_main, call_tool
from tools.sample import write


class Says(nn.Module):
    """Is sure of the next byte of a text, again and again; counts how often it was asked."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text, self.asked = text, 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (1, time, 256)."""
        logits = torch.full((1, tokens.shape[1], 256), -1e9)
        logits[0, -1, self.text[self.asked % len(self.text)]] = 1e9
        self.asked += 1
        return logits


def pieces(model: Says, length: int) -> Iterator[str]:
    return write(model, "é:", length, context=4, temperature=1.0, seed=0)


def test_each_byte_is_given_before_the_model_is_asked_for_the_next() -> None:
    model = Says(b"ab")
    for number, piece in enumerate(pieces(model, 6)):
        assert piece == ["é:", *"ababab", ""][number]
        assert model.asked == min(number, 6)


def test_a_character_of_several_bytes_is_whole_and_one_that_was_cut_is_replaced() -> None:
    assert list(pieces(Says("ü€".encode()), 5)) == ["é:", "", "ü", "", "", "€", ""]
    assert "".join(pieces(Says(b"a\xc3"), 3)) == "é:a\N{REPLACEMENT CHARACTER}a"
    assert "".join(pieces(Says(b"a\xc3"), 2)) == "é:a\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, trained in three threads."""
    root = tmp_path_factory.mktemp("sample")
    (root / "text.txt").write_text("".join(f"{n} times 7 is {7 * n}.\n" for n in range(200)))
    words = f"--data text --data-path {root}/text.txt --context 16 --layers 1 --width 16 --heads 2"
    more = f"--epochs 1 --max-steps 2 --cpu-threads 3 --nproc 1 --output-dir {root}/run"
    (answer,) = pool.run(call_main, 1, "fsdp", [*words.split(), *more.split()])
    assert answer[0] == 0, answer
    return root / "run"


def sampled_in(_ranks: object, arguments: list[str]) -> tuple[int, str, str, int]:
    torch.set_num_threads(1)
    status, printed, said = call_tool(_ranks, "tools.sample", arguments)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return status, printed, said, threads


def test_as_many_threads_as_training_had(pool: Pool, run: Path) -> None:
    given = [str(run), "--prompt", "7 times", "--length", "5"]
    ((status, printed, said, threads),) = pool.run(sampled_in, 1, given)
    assert (status, threads) == (0, 3), said
    assert printed.startswith("7 times")
    assert "bits per character on the held-out text: " in said


def test_a_reader_of_the_command_gets_the_first_bytes_while_it_goes_on(run: Path) -> None:
    words = ["sample", str(run), "--prompt", "7", "--length", "9999999"]
    command = [sys.executable, "-m", "recipes", *words]
    process = subprocess.Popen(command, env=clean_env(), stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert len(process.stdout.read(20)) == 20
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
