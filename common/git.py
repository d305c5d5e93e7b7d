"""What code runs: the commit, the files that differ from it, and the diff without secrets."""

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from common import ROOT
from common.masking import masked_diff

_PRIVATE = re.compile(
    r"(?i)(^|/)(\.env|\.netrc|\.htpasswd|\.pypirc|\.npmrc|id_\w+$)|\.(env|key|pem|p12|pfx)$"
)
"""Files whose content is never kept."""

_MOST_BYTES = 2**20
"""Length of the diff, and of a new file in it."""


def git(*command: str) -> str:
    """What git says about this repository; nothing if it is none."""
    return output("git", "-C", str(ROOT), *command)


def output(*command: str) -> str:
    """What a program prints; nothing if it fails."""
    try:
        said = subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.decode(errors="replace")


def new_files() -> list[str]:
    """Files that are not in the commit, that git does not ignore, and that no run has left."""
    names = git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]
    runs = tuple(name.removesuffix(".lock") for name in names if name.endswith("/.lock"))
    return [name for name in names if not name.startswith(runs)]


def _differing() -> list[str]:
    """Files of the commit that are changed or deleted."""
    return git("diff", "--name-only", "--relative", "-z", "HEAD").split("\0")[:-1]


def changed_files() -> dict[str, str]:
    """SHA-256 of each file that is not as in the commit: changed, deleted or new."""
    return {name: _digest(ROOT / name) for name in [*_differing(), *new_files()][:1000]}


def _digest(path: Path) -> str:
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= 2**24:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return f"{path.stat().st_size} bytes"
    return "gone"


def changes() -> bytes:
    """The diff between the commit and the code that runs, with new files, without secrets."""
    private = [f":(exclude,literal){name}" for name in _differing() if _PRIVATE.search(name)]
    diff = git("diff", "--relative", "--no-color", "--no-ext-diff", "HEAD", "--", ".", *private)
    for name in new_files():
        path = ROOT / name
        with suppress(OSError, UnicodeDecodeError):
            if path.is_symlink() or path.stat().st_size > _MOST_BYTES or _PRIVATE.search(name):
                continue
            *lines, rest = path.read_bytes().decode().split("\n")
            lines += [f"{rest}\n\\ No newline at end of file"] if rest else []
            diff += f"--- /dev/null\n+++ b/{name}\t\n@@ -0,0 +1,{len(lines)} @@\n"
            diff += "".join(f"+{line}\n" for line in lines)
        if len(diff) > _MOST_BYTES:
            break
    kept = masked_diff(diff[: 2 * _MOST_BYTES]).encode()
    return kept if len(kept) <= _MOST_BYTES else kept[:_MOST_BYTES] + b"\ncut here: too long\n"


def code_files() -> dict[str, str]:
    """SHA-256 of each Python file that a run may use, by name."""
    files = (
        path for room in ("common", "recipes", "tools") for path in (ROOT / room).rglob("*.py")
    )
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def code_sha256() -> str:
    """SHA-256 over names and contents of the Python files that a run may use."""
    lines = (f"{content} {name}\n" for name, content in code_files().items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def image_commit() -> tuple[str | None, bool | None, dict[str, str]]:
    """The commit that an image was built from, and what this code has otherwise than the image.

    The image has its commit in RECIPES_COMMIT (with "-dirty" if files had changed), and the hashes
    of its code beside its lock. Code that was mounted or added since has other hashes.

    Returns:
        The commit; whether this code is not the commit's; as `changed_files`, the files of this
        code that are not the image's.
    """
    built_from = os.environ.get("RECIPES_COMMIT", "unknown")
    if built_from == "unknown":
        return None, None, {}
    try:
        had = json.loads((Path(sys.prefix) / "code.json").read_text())
    except (OSError, ValueError):
        return built_from.removesuffix("-dirty"), True, {}
    has = code_files()
    changed = {name: has.get(name, "gone") for name in sorted(had.keys() | has.keys())}
    changed = {name: content for name, content in changed.items() if content != had.get(name)}
    return (
        built_from.removesuffix("-dirty"),
        built_from.endswith("-dirty") or bool(changed),
        changed,
    )
