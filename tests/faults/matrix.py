"""The fault matrix as JSON, and as the table of docs/faults.md."""

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from common import ROOT
from common.machine import describe_machine
from common.writing import write_json
from tools.bench import put_between

RESULT = Path(__file__).parent / "results" / "matrix.json"
BEGIN, END = "<!-- faults: written by make test SUITE=faults -->", "<!-- end of faults -->"
SHORTEST = 8
"""Words of a line that the table shows at least, if the line has them."""

_NUMBERS = {
    r"\b[0-9a-f]{16}\b": "CHECKSUM",
    r"\(pid \d+\)": "(pid PID)",
    r"has format \d+, this code reads \d+": "has format NEW, this code reads OLD",
}
"""What differs from run to run or from version to version; its name in the table."""


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the results."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"command": "make test SUITE=faults", **describe_machine(), "rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """One line per fault, seen in all its recipes; faults with the same first line share one."""
    alike: dict[tuple[str, int], list[dict[str, Any]]] = {}
    names: dict[str, tuple[str, int]] = {}
    for row in rows:  # the first recipe's line counts
        said = re.sub(r" at \S+:\d+ \(.*?\)|\d+", "#", _beginning(row["first_line"]))
        key = names.setdefault(row["fault"], (said or row["fault"], row["status"]))
        alike.setdefault(key, []).append(row)
    heading = "| what happens | ended after [s] | status | first line, without `error:` |"
    lines = [heading, "|---|---|---|---|"]
    for found in alike.values():
        seconds = max(row["seconds"] for row in found)
        said = _beginning(found[0]["first_line"]).replace("|", "\\|").removeprefix("error: ")
        what = _joined([row["fault"] for row in found])
        lines.append(f"| {what} | {seconds:.1f} | {found[0]['status']} | {said} |")
    return "\n".join(lines)


def _beginning(line: str) -> str:
    """The first clauses of a line, `SHORTEST` words or more."""
    for pattern, name in _NUMBERS.items():
        line = re.sub(pattern, name, line)
    clauses = re.split(r"(?<=[:;,]) ", line)
    beginnings = (" ".join(clauses[:end]) for end in range(1, len(clauses)))
    whole = (text for text in beginnings if text.count("(") == text.count(")"))
    return next((f"{text} ..." for text in whole if len(text.split()) >= SHORTEST), line)


def _joined(faults: list[str]) -> str:
    """`a rank sleeps`, `a rank hangs`: `a rank sleeps / hangs`."""
    without = r" \(rank \d\)| while the run goes on"
    words = [
        re.findall(r"\(.*?\)\S*|\S+", fault)
        for fault in dict.fromkeys(re.sub(without, "", fault) for fault in faults)
    ]
    if len(words) == 1:
        return " ".join(words[0])
    columns = zip(*words, strict=False)
    start = len([*takewhile(lambda column: len(set(column)) == 1, columns)])
    end = -1 if len({each[-1] for each in words}) == 1 and "(" in words[0][-1] else None
    parts = " / ".join(" ".join(each[start:end]) for each in words)
    return " ".join([*words[0][:start], parts, *(words[0][end:] if end else [])])


def main() -> None:
    """Renew the page's table from the result."""
    page = ROOT / "docs" / "faults.md"
    rows = json.loads(RESULT.read_text())["rows"]
    put_between(page, BEGIN, END, table(rows))


if __name__ == "__main__":
    main()
