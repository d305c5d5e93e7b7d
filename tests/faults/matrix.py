"""The fault matrix as JSON."""

from pathlib import Path
from typing import Any

from common.manifest import describe_machine
from common.writing import write_json

RESULT = Path(__file__).parent / "results" / "matrix.json"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the results."""
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"command": "make test SUITE=faults", **describe_machine(), "rows": rows})
