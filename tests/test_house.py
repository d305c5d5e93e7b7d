"""The house's own rules: which way imports point, what files must not hold, links that work."""

import ast
import json
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import common
from common import launch
from tests.helpers.commands import FILES, ROOT
from tests.helpers.machine import need
from tools import bench


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_test_imports_another() -> None:
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in imported(path):
            assert not re.match(r"tests\.(.+\.)?test_", name), f"{path} imports {name}"


def listed() -> dict[str, int]:
    """Rooms and files of `common` in its list, `run` or `run.loop`, and in which line each is."""
    found: dict[str, int] = {}
    room = ""
    lines = str(common.__doc__).splitlines()
    for number, line in enumerate(lines):
        if entry := re.match(r"    (  )?(\w+)(/?)  +\S", line):
            inside, name, is_room = entry.groups()
            room = name if is_room else room if inside else ""
            found[f"{room}.{name}" if inside else name] = number
    return found


def test_the_list_of_common_is_complete() -> None:
    there = {path.relative_to(ROOT / "common") for path in (ROOT / "common").rglob("*.py")}
    names = {
        ".".join(path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts)
        for path in there
    }
    assert set(listed()) == names - {""}


def test_imports_point_down() -> None:
    lines = listed()
    for path in sorted((ROOT / "common").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = parts[1]
        for name in imported(path):
            first, *rest = name.split(".")
            assert first not in {"recipes", "tools", "tests", "submitit", "slurm"}, path
            assert first != "tyro" or room == "parse", path
            if first == "common" and rest and rest[0] in lines and rest[0] != room:
                assert room != "__init__", f"{path} imports {name}"
                assert lines[rest[0]] > lines[room], f"{path} imports {name}"


def test_recipes_import_common_only() -> None:
    """What measures them may use the tools; a recipe that trains may not."""
    folders = {path.parent.name for path in (ROOT / "recipes").glob("*/train.py")}
    for path in sorted((ROOT / "recipes").glob("*/*.py")):
        for name in imported(path):
            parts = name.split(".")
            assert parts[0] != "tools" or path.name == "compare.py", f"{path} imports {name}"
            if parts[0] == "recipes":
                assert parts[1] not in folders - {path.parent.name}, f"{path} imports {name}"


@pytest.mark.parametrize("lock", ["cu132", "cu130", "cu128", "dev", "peers"])
def test_locks_pin_every_package_by_hash_and_name_no_index(lock: str) -> None:
    text = (ROOT / "docker" / "stacks" / f"{lock}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 10
    for entry in entries:
        assert re.match(r"[a-z0-9][a-z0-9._-]*==\S+", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]
    assert not re.search(r"https?:|index-url|find-links", text)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a Markdown file's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_in_markdown_lead_somewhere() -> None:
    pages = [ROOT / name for name in FILES if name.endswith(".md")]
    assert ROOT / "README.md" in pages
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(path), f"{page.name}: {target}"


def between(text: str, begin: str, end: str) -> str:
    return text.partition(begin)[2].partition(end)[0].strip()


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("recipes/*/results/comparison.json")), ids=lambda p: p.parts[-3]
)
def test_tables_in_readmes_come_from_their_json(path: Path) -> None:
    readme = (path.parents[1] / "README.md").read_text()
    written = between(readme, *bench.marks("results"))
    name, result = path.parts[-3], json.loads(path.read_text())
    assert written == bench.markdown(bench.on_page(name, result))
    measured = {column for table in result["tables"] for column in table["columns"]}
    headings = getattr(import_module(f"recipes.{name}.compare"), "HEADINGS", {})
    assert headings.keys() <= measured
    assert (path.parent / "comparison.png").stat().st_size > 5000


FIRST = ROOT / "recipes" / "ddp_launch" / "results" / "make_run.json"
"""The default run that the first page shows, and no other page."""


@pytest.mark.parametrize(
    "path",
    sorted({*ROOT.glob("recipes/*/results/make_run.json")} - {FIRST}),
    ids=lambda p: p.parts[-3],
)
def test_what_readmes_say_was_printed_comes_from_its_json(path: Path) -> None:
    readme = (path.parents[1] / "README.md").read_text()
    written = between(readme, *bench.marks("default run"))
    assert written == bench.shown(json.loads(path.read_text()))


def test_shell_files_are_clean() -> None:
    need("shellcheck")
    files = [ROOT / name for name in FILES if name.endswith((".sh", ".sbatch"))]
    assert len(files) >= 4
    subprocess.run(
        ["shellcheck", "--external-sources", *files, ROOT / ".ci" / "run"], cwd=ROOT, check=True
    )


def test_the_first_screen_shows_the_recorded_run() -> None:
    printed = json.loads(FIRST.read_text())["printed"]
    shown = between((ROOT / "README.md").read_text(), "$ make run RECIPE=ddp_launch\n", "```")
    lines = [line for line in shown.splitlines() if line not in ("", "...")]
    assert lines[0].startswith("making .venv")
    assert len(lines) > 5
    for line in lines[1:]:
        assert line in printed, line


def test_the_first_page_lists_every_recipe_that_has_a_page() -> None:
    """One without a page is a user's own, begun with `make new`."""
    listed = re.findall(r"\[`(\w+)`\]\(recipes/\1/", (ROOT / "README.md").read_text())
    pages = (ROOT / "recipes").glob("*/README.md")
    assert sorted(listed) == sorted(page.parent.name for page in pages)
    assert all((ROOT / "recipes" / name / "train.py").is_file() for name in listed)


def test_every_variable_of_ours_is_listed_in_one_place() -> None:
    code = [name for name in FILES if not name.startswith("tests/") and (ROOT / name).is_file()]
    used = {
        variable
        for name in code
        for variable in re.findall(r"\bRECIPES_[A-Z_]+\b", (ROOT / name).read_text("latin-1"))
    }
    listed = re.findall(r"(?m)^    (RECIPES_[A-Z_]+) ", launch.__doc__ or "")
    assert used == set(listed)


def test_the_first_picture_shows_one_result() -> None:
    runs = json.loads((ROOT / "docs" / "same_bits.json").read_text())["runs"]
    assert len(runs) == 4
    first, *others = runs.values()
    assert all(other == first for other in others), "the same weights, the same logged losses"


def test_ddp_launch_and_ddp_spawn_differ_only_in_who_starts_the_ranks() -> None:
    launched, spawned = (
        {
            node.name: ast.dump(node)
            for node in ast.parse((ROOT / "recipes" / name / "train.py").read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for name in ("ddp_launch", "ddp_spawn")
    )
    assert spawned.keys() - launched.keys() == {"worker", "spawn"}
    assert {name for name in launched if launched[name] != spawned.get(name)} == {"main"}
