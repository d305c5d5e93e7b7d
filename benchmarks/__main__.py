"""`make bench`: what this repository does about speed, each measured beside what it replaces.

python -m benchmarks [PART ...]             measure; renew results/ and README.md here
python -m benchmarks --rounds 1 --output DIR  measure into DIR, and change nothing here
python -m benchmarks --redraw               renew figures and README.md from the JSON
"""

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from common import cli
from common.errors import InputError
from common.files import write_json
from common.run.manifest import describe_machine
from tools import bench

HERE = Path(__file__).parent
PARTS = ("step", "input", "snapshots", "network")
ON_DEMAND = ("learning",)  # says nothing of speed, and takes half an hour


def main(arguments: Sequence[str]) -> None:
    """Measure parts, or redraw what was measured.

    Raises:
        InputError: no such part, or nothing to redraw.
    """
    parser = cli.Parser("", __doc__)
    parser.prog = "python -m benchmarks"
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(PARTS)} (all where none is named), or {', '.join(ON_DEMAND)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each variant, in turn")
    parser.add_argument("--output", type=Path, help="folder for the results, instead of here")
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        raise InputError("--rounds must be at least 1")
    parts = (*PARTS, *ON_DEMAND)
    if unknown := set(given.parts) - set(parts):
        raise InputError(f"no part {', '.join(sorted(unknown))}: {', '.join(parts)} are there")
    if "network" in (given.parts or PARTS) and not given.redraw and os.geteuid():
        raise InputError(f"network needs root, for hosts of its own: name {', '.join(PARTS[:-1])}")
    folder: Path = given.output or HERE / "results"
    for part in given.parts or PARTS:
        module, file = import_module(f"benchmarks.{part}"), folder / f"{part}.json"
        if not given.redraw:
            machine = describe_machine()  # of the code that is measured
            start_s = time.monotonic()
            with tempfile.TemporaryDirectory() as scratch:
                found = module.measure(Path(scratch), given.rounds)
            about = {
                "command": shlex.join(["python", "-m", "benchmarks", part])
                + (f" --rounds {given.rounds}" if given.rounds != 5 else ""),
                "elapsed_s": round(time.monotonic() - start_s, 1),
                **machine,
                "gpu": None,  # there may be one, but nothing here uses it
            }
            folder.mkdir(parents=True, exist_ok=True)
            write_json(file, {"about": about, **found})
        elif not file.exists():
            raise InputError(f"nothing was measured yet: {file} is missing")
        result = json.loads(file.read_text())
        module.draw(result, folder / f"{part}.png")
        print(bench.plain(result))
        if given.output is None:
            page = HERE / "README.md"
            begin, end = f"<!-- {part}: written by make bench -->", f"<!-- end of {part} -->"
            content = bench.markdown(result, part)
            page.write_text(bench.put_between(page.read_text(), begin, end, content))


if __name__ == "__main__":
    sys.exit(cli.attempt(lambda: main(sys.argv[1:])))
