"""All pages together: their numbers, words and marks, and that every command on them works.

`test_commands_of_pages_run` runs a command on small data and for two steps. What cannot be run so
(a cluster, an image, two hosts) is named in ELSEWHERE with the test that runs it, or in NEVER_RUN,
and then the page says so.
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torchvision.models import resnet34

from common.parse import parse
from recipes.__main__ import recipes
from tests.faults import matrix
from tests.helpers.commands import FILES, ROOT, clean_env, copy_of_repository
from tests.helpers.images import flowers, photo, small_fashion_mnist
from tests.helpers.machine import need

MARK = "(untried on a GPU)"
PAGES = sorted(ROOT / name for name in FILES if name.endswith(".md"))
FOR_USERS = [page for page in PAGES if page.name != "CONTRIBUTING.md"]

_PROGRAMS = "make|python|torchrun|srun|sbatch|docker|mkdir|cp|bash"  # not `git clone URL`
_COMMAND = re.compile(rf"(?:\w+\$ |\$ |!)?((?:[A-Z_]+=\S+ )*(?:\S*/)?(?:{_PROGRAMS}) .*)")


def commands() -> list[tuple[str, str]]:
    """Page and text of every command in the pages' blocks, in their order, without comments."""
    found = []
    for page in PAGES:
        for kind, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", page.read_text()):
            if kind in ("", "bash"):
                for line in block.replace("\\\n", " ").splitlines():
                    if match := _COMMAND.fullmatch(line):
                        text = re.sub(r"\s+#.*", "", match[1])
                        found.append((str(page.relative_to(ROOT)), " ".join(text.split())))
    return found


COMMANDS = commands()

ELSEWHERE = {
    r"make run RECIPE=\w+$": "test_make_run_with_its_defaults",
    r"make (check|test|format)": ".ci/run",
    r"make bench": "test_the_command_measures",
    r"make run .*NNODES=|torchrun --nnodes": "test_by_hand_and_by_torchrun",
    r"make slurm-check": "test_make_slurm_check",
    r"sbatch .*torchrun.sbatch|sbatch .*train.sbatch": "test_two_nodes_with_two_ranks_each",
    r"srun .*tar ": "test_data_on_each_nodes_disk",
    r"bash slurm/train.sbatch": "test_data_on_each_nodes_disk",
    r"srun ": "test_ranks_and_devices_of_every_kind_of_step",
    r"\S*python slurm/submit.py .*--over": "test_a_sweep_is_an_array",
    r"\S*python slurm/submit.py": "test_submitit_follows_a_job_that_goes_on",
    r"make image-run": "test_make_image_run_says_what_it_ran",
    r"make image$|make image &&": "test_the_weights_of_make_run",
    r"make image TARGET=development": "test_development_has_the_tests_and_a_compiler",
    r"docker build": "test_a_plain_build_installs_nothing_again",
    r"docker run --rm torch-recipes:\w+$": "test_no_argument_lists_the_recipes",
    r"docker run .*predict": "test_predict_says_in_the_image_what_it_says_here",
    r"docker run .*-development check": "test_development_has_the_tests_and_a_compiler",
    r"mkdir .*docker compose": "test_two_hosts_of_compose",
}
"""Commands whose programs other tests run, and which tests; the first match counts."""

NEVER_RUN = (
    r"docker run .*--gpus|CONTAINER=|CUDA_VISIBLE_DEVICES=|make gpu-check|--device-ids|cuda:"
)
"""Commands that need what we have not: their page says so."""


def recipe_and_options(command: str) -> tuple[str, list[str]] | None:
    """Recipe and options that a command gives it; None if it starts no recipe."""
    if command.startswith("make "):
        given = dict(word.partition("=")[::2] for word in shlex.split(command)[1:] if "=" in word)
        if "RECIPE" not in given or "make new" in command or "make bench" in command:
            return None
        launch = ["--nproc", given["NPROC"]] if "NPROC" in given else []
        return given["RECIPE"], [*launch, *shlex.split(given.get("ARGS", ""))]
    names = "|".join(recipes())
    match = re.search(rf"(?:recipes\.|\s)({names})(?:\.train)?((?:\s[^>'&|]*)?)", command)
    if not match:
        return None
    words = shlex.split(re.sub(r"\$\w+", "0", match[2]))
    return match[1], words[words.index("--") + 1 :] if "--" in words else words  # submit.py's


def test_there_are_commands_of_every_kind() -> None:
    for part in ("make run", "make predict", "sbatch", "docker run", "torchrun", "python -m"):
        assert any(part in command for _, command in COMMANDS), part


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_options_on_pages_are_known(page: str, command: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|&& )make ([a-z-]+)", command):
        assert target in targets, page
    if found := recipe_and_options(command):
        name, options = found
        if name not in ("mine", "squares", "lines") and "--help" not in options:
            config = importlib.import_module(f"recipes.{name}.train").Config
            parse(name, config, options)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_is_run_or_said_to_be_untried(page: str, command: str) -> None:
    if re.search(NEVER_RUN, command):
        text = (ROOT / page).read_text()
        assert MARK in text or "never run" in text, page
        return
    runs = [test for pattern, test in ELSEWHERE.items() if re.match(pattern, command)]
    if not runs:
        assert runnable(command), f"{page}: which test runs {command}?"
        return
    assert (ROOT / runs[0]).exists() or f"def {runs[0]}(" in all_tests()


@cache
def all_tests() -> str:
    return "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))


def runnable(command: str) -> bool:
    """Whether `test_commands_of_pages_run` runs it."""
    elsewhere = any(re.match(pattern, command) for pattern in ELSEWHERE)
    return not elsewhere and not re.search(NEVER_RUN, command)


def smaller(command: str, clone: Path) -> str:
    """The command with this interpreter, on small data that are there, and for two steps."""
    python = shlex.quote(sys.executable)
    text = re.sub(r"^(\.venv/bin/)?python ", f"{python} ", command)
    text = text.replace("PYTHON=python3", f"PYTHON={python}")  # which has no packages here
    text = re.sub(r"^torchrun ", f"{python} -m torch.distributed.run ", text)
    text = text.replace("runs/ddp_launch/.../model.pt", "runs/digits/model.pt")
    text = text.replace("RUN=runs/first", "RUN=runs/digits")  # by the notebook's first cell
    text = text.replace(" TO=", f" TO={len(list(clone.glob('*.pt2')))}")  # one that is new
    text = re.sub(r"runs/ddp_launch/RUN|\bRUN(?!=)", "runs/photos", text)
    text = text.replace("runs/fsdp/UTC-TIME", "runs/text").replace(" --download", "")
    text = text.replace(" --sync-bn", "")  # for GPUs
    found = recipe_and_options(command)
    if not found or {"--help", "--check", "--dry-run", "--show"} & set(found[1]):
        return text
    name, options = found
    less = {"check_network": "", "tune_loader": "--image-size 32 --samples 96 --rounds 1"}.get(
        name, "--epochs 1 --max-steps 2"
    )
    less += " --length 64" * ("--length" in options)
    less += " --image-size 32" * ("imagefolder" in options and name != "tune_loader")
    if name == "dp_scratch":
        less += " --global-batch-size 4"
    less += f" --output-dir runs/{len(list((clone / 'runs').iterdir()))}"
    if "ARGS=" in text:
        return re.sub(r'ARGS=("?)(.*?)\1$', rf'ARGS="\2 {less}"', text)
    return f'{text} ARGS="{less}"' if text.startswith("make") else f"{text} {less}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's repository, with data and finished runs of the names that the pages use."""
    folder = copy_of_repository(tmp_path_factory.mktemp("clone"))
    flowers(folder / "flower_photos", per_class=100)
    flowers(folder / "other_photos")
    photo(folder / "one.jpg", 1)
    photo(folder / "photos" / "two.jpg", 2)
    small_fashion_mnist(folder / "data")
    (folder / "my_texts").mkdir()
    text = "".join(f"Line {number} of a small text.\n" for number in range(2000))
    (folder / "my_texts" / "text.txt").write_text(text)
    torch.save(resnet34().state_dict(), folder / "resnet34-b627a593.pth")
    photos = (
        "ddp_launch --nproc 1 --data imagefolder --data-path other_photos --model resnet18 "
        "--image-size 32 --global-batch-size 8 --epochs 4 --epoch-weights --output-dir runs/photos"
    )
    texts = "fsdp --nproc 1 --epochs 1 --max-steps 2 --output-dir runs/text"
    digits = "ddp_launch --nproc 1 --epochs 1 --max-steps 2 --output-dir runs/digits"
    for arguments in (photos, texts, digits):
        command = [sys.executable, "-m", "recipes", *arguments.split()]
        subprocess.run(command, cwd=folder, env=clean_env(), check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_commands_of_pages_run(clone: Path) -> None:
    need("make")
    env = {**clean_env(), "PYTHON": sys.executable}
    failed = []
    for command in dict.fromkeys(text for _, text in COMMANDS if runnable(text)):
        text = smaller(command, clone)
        done = subprocess.run(
            ["bash", "-c", text], cwd=clone, env=env, capture_output=True, text=True
        )
        if done.returncode:
            failed.append(f"{command}\n{text}\n{done.stdout}\n{done.stderr}")
    assert not failed, "\n".join(failed)


def shown_words(text: str) -> int:
    """Words that a reader sees: without comments and the bars of tables."""
    seen = re.sub(r"(?s)<!--.*?-->", "", text).split()
    return sum(bool(word.strip("|-:")) for word in seen)


def test_the_pages_are_short_and_in_the_readers_words() -> None:
    words = {page: shown_words(page.read_text()) for page in PAGES}
    assert sum(words.values()) <= 16_500, words
    for page in FOR_USERS:
        for word in ("law", "laws", "rooms", "house", "front door", "twin"):
            found = re.search(rf"(?i)(?<![\w/]){word}(?![\w/])", page.read_text())
            assert not found, f"{page}: {word}"


def test_what_no_gpu_has_shown_is_said_once_per_page() -> None:
    code = [*(ROOT / "common").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert [file for file in code if MARK in file.read_text()] == []
    assert [page for page in PAGES if page.read_text().count(MARK) > 1] == []


def test_figures_of_the_gpu_are_those_of_its_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    runs = [*record["trained"].values()]
    for name in ("bf16, channels_last, batch 512", "bf16, channels_last, compile, batch 512"):
        run = record["on_the_device"]["runs"][name]
        runs.append({**run, "peak_memory_gb": run["peak_memory_bytes"] / 1e9})
    page = (ROOT / "benchmarks" / "README.md").read_text()
    table = page.partition("## One GPU")[2].partition("\n## ")[0]
    found = re.findall(r"\| ([\d,]+) \| ([\d.]+) \|\n", table)
    assert found == [(f"{r['images_per_s']:,.0f}", f"{r['peak_memory_gb']:.1f}") for r in runs]
    ours, plain = (runs[n]["images_per_s"] for n in (1, 3))
    assert f"{ours / plain:.2f} times on [one H200]" in (ROOT / "README.md").read_text()


def test_the_first_screen_counts_what_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    ours = [page.parent / "train.py" for page in ROOT.glob("recipes/*/README.md")]  # not a user's
    sizes = [len(file.read_text().splitlines()) for file in ours]
    library = sum(len(file.read_text().splitlines()) for file in (ROOT / "common").rglob("*.py"))
    faults = {row["fault"] for row in json.loads(matrix.RESULT.read_text())["rows"]}
    assert "Nine recipes" in text
    assert len(sizes) == 9
    assert f"scripts of {min(sizes)} to {max(sizes)} lines" in text
    assert f"({round(library, -3):,} lines)" in text
    assert f"cause {len(faults)} faults" in text
