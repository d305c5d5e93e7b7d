"""`make image-repro`: build one commit twice from nothing, and name what differs in the bytes."""

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from common.manifest import describe_machine
from common.writing import write_json
from tests.helpers.commands import ROOT
from tests.helpers.engine import Engine

RESULT = ROOT / "docker" / "results" / "repro.json"


def build(engine: Engine, file: Path) -> float:
    """Build the image into an OCI archive with nothing cached but the downloaded wheels."""
    start_s = time.monotonic()
    output = f"type=oci,dest={file},rewrite-timestamp=true,compression=uncompressed"
    arguments = [*engine.build_arguments(), "--no-cache", "--provenance=false", "--output", output]
    engine.call(
        "make", "image", f"DOCKER={'docker buildx'}", f"BUILD={' '.join(arguments)}", timeout_s=3600
    )
    return time.monotonic() - start_s


def describe(file: Path) -> dict[str, Any]:
    """An archive's digest and its layers' file names with the SHA-256 of what they hold."""
    with tarfile.open(file) as archive:

        def read(name: str) -> Any:
            member = archive.extractfile(name)
            assert member is not None
            return json.load(member)

        index = read("index.json")["manifests"][0]
        manifest = read(f"blobs/{index['digest'].replace(':', '/')}")
        layers: list[dict[str, Any]] = []
        for layer in manifest["layers"]:
            blob = archive.extractfile(f"blobs/{layer['digest'].replace(':', '/')}")
            files, wheels = contents(blob)
            layers.append(
                {
                    "digest": layer["digest"],
                    "bytes": layer["size"],
                    "wheels_bytes": wheels,
                    "files": files,
                }
            )
    return {"digest": index["digest"], "layers": layers}


def contents(blob: Any) -> tuple[dict[str, str], int]:
    """A hash over header and bytes of each entry of a layer, and the size of the wheels' files."""
    found, wheels_bytes = {}, 0
    with tarfile.open(fileobj=blob, mode="r|*") as layer:
        for entry in layer:
            header = (entry.mode, entry.uid, entry.gid, entry.mtime, entry.type, entry.linkname)
            digest = hashlib.sha256(repr(header).encode())
            if entry.isreg() and (file := layer.extractfile(entry)):
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            found[entry.name] = digest.hexdigest()
            if entry.name.startswith("opt/venv/lib/") and "/__pycache__/" not in entry.name:
                wheels_bytes += entry.size
    return found, wheels_bytes


def main() -> int:
    """Build twice, compare, write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    lock = ROOT / "docker" / "stacks" / "cu132.txt"
    folder = Path(tempfile.mkdtemp(prefix="repro-", dir="/var/tmp"))
    engine = Engine(containerd_store=True)
    try:
        seconds, builds = [], []
        for number in (1, 2):
            print(f"build {number} of 2, some minutes", flush=True)
            seconds.append(round(build(engine, folder / f"{number}.tar"), 1))
            builds.append(describe(folder / f"{number}.tar"))
            (folder / f"{number}.tar").unlink()
    finally:
        engine.close()
        shutil.rmtree(folder)
    one, two = builds
    different = [
        name
        for first, second in zip(one["layers"], two["layers"], strict=True)
        for name in sorted(first["files"] | second["files"])
        if first["files"].get(name) != second["files"].get(name)
    ]
    result = {
        "command": "make image-repro",
        "machine": describe_machine(),
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest(),
        "digests": [one["digest"], two["digest"]],
        "identical": one["digest"] == two["digest"],
        "layers": [
            {"digest": a["digest"], "same": a["digest"] == b["digest"], "bytes": a["bytes"]}
            for a, b in zip(one["layers"], two["layers"], strict=True)
        ],
        "image_bytes": (image := sum(layer["bytes"] for layer in one["layers"])),
        "wheels_bytes": (wheels := sum(layer["wheels_bytes"] for layer in one["layers"])),
        "image_to_wheels": round(image / wheels, 3),
        "different_files": different,
        "build_s": seconds,
    }
    RESULT.parent.mkdir(exist_ok=True)
    write_json(RESULT, result)
    same = "one digest" if result["identical"] else f"{len(different)} files differ"
    print(f"{same}: {', '.join(result['digests'])}; {RESULT.relative_to(ROOT)}")
    return 0 if result["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
