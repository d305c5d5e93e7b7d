"""What make image tells the container engine, without an engine."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, clean_env
from tests.helpers.machine import need


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two files that are in no commit, one of them hidden."""
    need("make")
    tree = tmp_path_factory.mktemp("tree")
    subprocess.run(["git", "init", "-q", tree], check=True)
    for name in ("tools", "docker"):
        (tree / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "Makefile", tree)
    subprocess.run(["git", "-C", tree, "add", "."], check=True)
    (tree / "recipes" / "mine").mkdir(parents=True)
    for name in (".env", "new.py"):
        (tree / "recipes" / "mine" / name).touch()
    return tree


@pytest.mark.parametrize(
    ("origin", "label"),
    [
        ("https://me:p@ss@host/o/r.git", "https://host/o/r.git"),
        ("https://host/o/r.git?private_token=abc", "https://host/o/r.git"),
        ("ssh://git@host:22/o/r", "ssh://host:22/o/r"),
        ("git@host:o/r.git", "host:o/r.git"),
        ("/home/me/r.git", ""),
        ("file:///home/me/r.git", ""),
        ("../r.git", ""),
    ],
)
def test_the_source_has_no_credentials_and_new_files_are_named(
    tree: Path, origin: str, label: str
) -> None:
    subprocess.run(["git", "-C", tree, "config", "remote.origin.url", origin], check=True)
    command = ["make", "-s", "image", "DOCKER=echo"]
    done = subprocess.run(
        command, cwd=tree, env=clean_env(), capture_output=True, text=True, check=True
    )
    before, found, after = done.stdout.partition("org.opencontainers.image.source=")
    assert (after.split()[0] if found else "") == label, before
    named = "files that are not in git go into the image: recipes/mine/new.py"
    assert named in done.stderr.splitlines()


def test_hidden_files_do_not_go_into_the_image() -> None:
    assert "**/.*" in (ROOT / ".dockerignore").read_text().splitlines()
