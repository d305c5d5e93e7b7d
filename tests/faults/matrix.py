"""The fault matrix as JSON, and as the table of docs/faults.md."""

import json
from pathlib import Path
from typing import Any

from common import ROOT
from common.machine import describe_machine
from common.writing import write_json
from tools.bench import put_between

RESULT = Path(__file__).parent / "results" / "matrix.json"
BEGIN, END = "<!-- faults: written by make test SUITE=faults -->", "<!-- end of faults -->"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the results."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"command": "make test SUITE=faults", **describe_machine(), "rows": rows})


def table(rows: list[dict[str, Any]]) -> str:
    """One line per fault: recipes, seconds until all processes have ended, status, first line."""
    lines = [
        "| what happens | in | all ended after | status | first line |",
        "|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        same = [row for row in rows if row["fault"] == fault]
        seconds = " / ".join(f"{row['seconds']:.1f}" for row in same)
        said = same[0]["first_line"].replace("|", "\\|")
        lines.append(
            f"| {fault} | {', '.join(row['recipe'] for row in same)} | {seconds} s | "
            f"{same[0]['status']} | {said} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Renew the page's table from the result."""
    page = ROOT / "docs" / "faults.md"
    rows = json.loads(RESULT.read_text())["rows"]
    put_between(page, BEGIN, END, table(rows))


if __name__ == "__main__":
    main()
