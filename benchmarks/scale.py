"""What many images and many ranks cost: the start of a run, memory, questions, reading.

It needs root, to empty the page cache, and strace. A million images are hard links to a thousand.
LitData is in no lock file, because its botocore wants an older python-dateutil than other packages
here. It is measured only where somebody has installed it; the tables have no row for it elsewhere.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from common.data.array_file import Texts
from common.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DataOptions, load_data
from common.data.image_folder import Listing
from common.data.loaders import rank_loaders
from common.data.packed import Pack
from common.data.stream import GlobalBatches
from common.errors import InputError
from common.figure import save_figure
from common.group.process_group import process_group
from common.launch.process import keep_freed_memory
from common.launch.ranks import Ranks
from common.terminal import progress_bar
from recipes.tune_loader.compare import write_photos
from tools import pack
from tools.comparison import in_turn, ratios, spread
from tools.fresh import fresh_environment, run_fresh

COUNTS = (10**4, 10**5, 10**6)
CLASSES, LINKED, WORKERS = 1000, 1000, 2
CPU = torch.device("cpu")
OPTIONS = {"nproc": 2, "num-workers": 2, "image-size": 32, "global-batch-size": 64, "log-every": 1}
RANKS = (2, 8, 32, 64)
STARTS = {
    "folder": "folder",
    "packed": "packed",
}
READERS = {
    "folder": "`--data imagefolder`",
    "packed": "`--data packed`",
    "memory": "from memory, without reading",
    "ImageFolder": "torchvision's ImageFolder",
    "WebDataset": "WebDataset, a buffer of 1,000",
    "LitData": "LitData, shuffled",
}
SIZES = {"64 px to 32": (32, 20_000), "500 px to 224": (224, 1_920)}
"""Side of the crop [px], and how many images are read."""


def write_images(root: Path, count: int) -> None:
    """A folder of `count` links to LINKED images of 64 px, in CLASSES classes."""
    base, random = root.parent / "linked", np.random.default_rng(0)
    if not base.exists():
        base.mkdir(parents=True)
        for number in range(LINKED):
            small = random.integers(0, 255, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(small).resize((64, 64)).save(base / f"{number}.jpg", quality=85)
    for label in range(CLASSES):
        folder = root / f"class_{label:04d}"
        folder.mkdir(parents=True)
        for number in range(count // CLASSES):
            source = base / f"{(label * 7 + number) % LINKED}.jpg"
            os.link(source, folder / f"{number:06d}.jpg")


def options_of(kind: str, folder: Path, count: int) -> list[str]:
    """How a recipe is told what to train on."""
    if kind == "packed":
        return ["--data", "packed", "--data-path", str(folder / f"{count}.packed")]
    path = str(folder / str(count))
    return ["--data", "imagefolder", "--data-path", path, "--no-verify-images"]


def command(kind: str, folder: Path, count: int, out: Path) -> list[str]:
    """A run's command line."""
    given = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    data = options_of(kind, folder, count)
    words = ["-m", "recipes", "ddp_launch", *given, *data, "--output-dir", str(out)]
    return [sys.executable, *words]


def tree(root: int) -> dict[int, int]:
    """Each process below `root`, and how many of its ancestors lie below it, too."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    depths: dict[int, int] = {}
    for process in parents:
        above, depth = process, 0
        while above not in (0, root):
            above, depth = parents.get(above, 0), depth + 1
        if above == root and depth:
            depths[process] = depth
    return depths


def mebibytes_of(process: int) -> float:
    """A process's share of memory: what it has alone, and its part of what several map (PSS)."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return int(re.findall(r"(?m)^Pss: +(\d+)", text)[0]) / 1024


def begin(words: list[str]) -> "subprocess.Popen[bytes]":
    """Start a command that says nothing here."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, env=fresh_environment(), stdout=quiet, stderr=quiet)


def start(kind: str, folder: Path, count: int) -> dict[str, float]:
    """Time to the first step [s], and the memory of a rank and of a loading process [MiB]."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    begun_s = time.perf_counter()
    process = begin(command(kind, folder, count, out))
    try:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            if process.poll() is not None:
                raise RuntimeError(f"{kind} with {count} images ended with {process.returncode}")
            time.sleep(0.01)
        elapsed_s = time.perf_counter() - begun_s
        time.sleep(2)  # all loading processes are at work
        depths = tree(process.pid)
        names = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in depths}
        ranks = [
            p for p, depth in depths.items() if depth == 1 and b"multiprocessing" not in names[p]
        ]
        workers = [p for p, depth in depths.items() if depth == 2]
        return {
            "first_step_s": elapsed_s,
            "rank_mib": max(map(mebibytes_of, ranks)),
            "worker_mib": max(map(mebibytes_of, workers)),
        }
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1)  # its ranks end with it


def meeting(ranks: int, folder: Path) -> dict[str, float]:
    """Ranks of check_network, which load torch and no data: when they met [s], memory [MiB]."""
    out = folder / "network"
    shutil.rmtree(out, ignore_errors=True)
    words = f"check_network --nproc {ranks} --device cpu --largest 1 --rounds 1 --timeout-s 600"
    process = begin([sys.executable, "-m", "recipes", *words.split(), "--output-dir", str(out)])
    most = [0.0, 0.0]
    while process.poll() is None:
        for place, one in enumerate([process.pid, *tree(process.pid)][:2]):  # itself, a rank
            with suppress(OSError, IndexError):  # it has just ended
                most[place] = max(most[place], mebibytes_of(one))
        time.sleep(0.2)
    found = json.loads((out / "network.json").read_text())
    assert len(found["ranks"]) == ranks
    return {"met_s": found["met_after_s"], "launcher_mib": most[0], "rank_mib": most[1]}


def questions(kind: str, folder: Path, count: int) -> int:
    """System calls of all processes that name the data or a part of it, before the first step."""
    out, trace = folder / "run", folder / "trace"
    shutil.rmtree(out, ignore_errors=True)
    path = options_of(kind, folder, count)[3]
    words = [
        "-f",
        "-y",
        "-o",
        str(trace),
        "-e",
        "trace=%file,getdents64,fstat",
        "--",
        *command(kind, folder, count, out),
    ]
    begin(["strace", *words, "--check"]).wait()
    with trace.open(errors="replace") as lines:
        return sum(f"{path}/" in line or f'{path}"' in line or f"{path}>" in line for line in lines)


def made_up_index(folder: Path, count: int = 10**7) -> None:
    """An index of so many images, and one tar file without them."""
    folder.mkdir()
    ends = np.arange(1, count + 1, dtype=np.int64) * 21
    names = np.full(int(ends[-1]), ord("x"), np.uint8)
    labels = np.repeat(np.arange(CLASSES, dtype=np.int32), count // CLASSES)
    sizes = np.full(count, 1000, np.int64)
    listing = Listing(
        [str(n) for n in range(CLASSES)], 0, "made up", Texts(names, ends), labels, sizes
    )
    records = np.zeros(count, pack.RECORD)
    records["size"], records["offset"] = 1000, np.arange(count) * 2560
    (folder / "000000.tar").write_bytes(bytes(1024))
    pack.write_index(folder, listing, records, [pack.described(folder, "000000.tar")], {})


def open_index(folder: Path) -> str:
    """Seconds to open an index and to check it, and private memory of a rank that uses it [MiB]."""

    def private_mib() -> float:
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(map(int, re.findall(r"(?m)^Private_\w+: +(\d+)", text))) / 1024

    before, begun_s = private_mib(), time.perf_counter()
    found = Pack(folder, check=False)
    opened_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    Pack(folder, check=True)
    checked_s = time.perf_counter() - begun_s
    opened_mib = private_mib() - before
    train, _ = found.listing.split(0)
    next(iter(GlobalBatches(len(train), [64], 0, 0)))
    return f"{opened_s} {checked_s} {opened_mib} {private_mib() - before}"


def sample_of_litdata(item: tuple[str, int]) -> dict[str, Any]:
    """What LitData keeps of an image: the bytes of its file, and its label."""
    return {"image": Image.open(item[0]), "label": item[1]}


def write_litdata(root: Path) -> None:
    """The images of `root`/folder for LitData, in files as long as those of the pack."""
    import litdata

    found = ImageFolder(str(root / "folder")).samples
    litdata.optimize(
        sample_of_litdata, found, str(root / "litdata"), num_workers=WORKERS, chunk_bytes=2**22
    )


def speed_of_reader(reader: str, root: Path, side: int, count: int) -> float:
    """Speed of loading normalised batches of 32 [samples/s]; the first batches do not count."""
    torch.set_num_threads(1)
    keep_freed_memory()
    crop = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
    normalize = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    classic = transforms.Compose([*crop, transforms.ToTensor(), normalize])
    on_tensors = transforms.Compose([*crop, transforms.ConvertImageDtype(torch.float), normalize])
    if reader == "ImageFolder":
        loader = DataLoader(
            ImageFolder(str(root / "folder"), classic), 32, True, num_workers=WORKERS
        )
        return timed(loader, count)
    if reader == "LitData":
        import litdata

        class Photos(litdata.StreamingDataset):
            def __getitem__(self, index: Any) -> tuple[Tensor, int]:
                sample = super().__getitem__(index)  # its image has been decoded to a tensor
                return on_tensors(sample["image"]), sample["label"]

        photos = Photos(str(root / "litdata"), shuffle=True)
        return timed(litdata.StreamingDataLoader(photos, batch_size=32, num_workers=WORKERS), count)
    if reader == "WebDataset":
        import webdataset

        tars = [str(path) for path in sorted((root / "packed").glob("*.tar"))]
        samples = webdataset.WebDataset(tars, shardshuffle=100, seed=0).shuffle(1000).decode("pil")
        pairs = samples.to_tuple("jpg", "cls").map_tuple(classic, int)
        return timed(
            webdataset.WebLoader(pairs.batched(32), batch_size=None, num_workers=WORKERS), count
        )
    is_folder = reader == "folder"
    options = DataOptions(
        data="imagefolder" if is_folder else "packed",
        data_path=root / ("folder" if is_folder else "packed"),
        verify_images=False,
        num_workers=WORKERS,
        image_size=side,
    )
    with process_group(Ranks(), CPU, "gloo", 600):
        data = load_data(options, 0, Ranks())
        if reader == "memory":  # the most that any way to read could give
            images: Any = data.train.source.pack
            contents = [images.read(index) for index in range(len(images))]
            images.read, images.will_read = contents.__getitem__, lambda _: None
        batches, _ = rank_loaders(data, options, [32], 0, 0, CPU, torch.float32, root)
        return timed(batches, count)


def timed(batches: Any, count: int) -> float:
    """Samples/s of the batches after the first ten, up to `count` samples."""
    found = iter(batches)
    seen, begun_s = 0, time.perf_counter()
    for number, batch in enumerate(islice(found, count // 32)):
        if number == 9:
            seen, begun_s = 0, time.perf_counter()
        else:
            seen += len(batch[0])
    speed = seen / (time.perf_counter() - begun_s)
    with suppress(AttributeError):
        found._shutdown_workers()
    return speed


def measure_starts(folder: Path, rounds: int) -> dict[str, Any]:
    """Each kind of data with each number of images; the first start is not counted."""
    starts: dict[str, Any] = {}
    for count in COUNTS:
        write_images(folder / str(count), count)
        pack.pack(folder / str(count), folder / f"{count}.packed", 2**30, 0, 90)
        for kind in STARTS:
            start(kind, folder, count)  # fills the page cache
    with progress_bar(len(COUNTS) * len(STARTS) * (rounds + 1), unit="start", keep=False) as bar:
        for count in COUNTS:
            for kind in STARTS:
                found: dict[str, Any] = {"runs": []}
                for _ in range(rounds):
                    found["runs"].append(start(kind, folder, count))
                    bar.update()
                found["questions"] = questions(kind, folder, count)
                bar.update()
                starts[f"{kind} {count}"] = found
    return starts


def measure_reading(folder: Path, rounds: int) -> dict[str, Any]:
    """The ways to read take turns, each in a fresh process."""
    reading: dict[str, Any] = {}
    readers = [name for name in READERS if name != "LitData" or find_spec("litdata")]
    for name, (crop, count) in SIZES.items():
        root = folder / name
        if crop == 32:
            write_images(root / "folder", COUNTS[1])
        else:
            write_photos(root / "folder", 2000, np.random.default_rng(0))
        pack.pack(root / "folder", root / "packed", 2**22, 0, 90)
        if "LitData" in readers:
            write_litdata(root)
        for cold in (False, True):
            if cold and crop == 32:
                continue  # these files are links to a thousand

            def one(
                reader: str,
                _round: int,
                root: Path = root,
                crop: int = crop,
                count: int = count,
                cold: bool = cold,
            ) -> float:
                if cold:
                    os.sync()
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                words = ["read", reader, str(root), str(crop), str(count)]
                return float(run_fresh("benchmarks.scale", words).split()[-1])

            reading[f"{name}{', cold' if cold else ''}"] = in_turn(readers, one, rounds)
    return reading


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """All parts, one after the other."""
    if not shutil.which("strace") or os.geteuid():
        raise InputError("scale needs root and strace: apt install strace")
    made_up_index(folder / "made up")
    opened = run_fresh("benchmarks.scale", ["open", folder / "made up"]).split()[-4:]
    result = {
        "starts": measure_starts(folder, rounds),
        "index": [float(number) for number in opened],
        "reading": measure_reading(folder, rounds),
        "ranks": {str(n): [meeting(n, folder) for _ in range(rounds)] for n in RANKS},
    }
    return {"tables": tables(result), **result}


def tables(result: dict[str, Any]) -> list[dict[str, Any]]:
    """As the page shows them."""
    rows = []
    for key, found in result["starts"].items():
        kind, count = key.split()
        runs = {n: [run[n] for run in found["runs"]] for n in found["runs"][0]}
        rows.append(
            [
                STARTS[kind],
                f"{int(count):,}",
                spread(runs["first_step_s"]),
                f"{statistics.median(runs['rank_mib']):.0f}",
                f"{statistics.median(runs['worker_mib']):.0f}",
                f"{found['questions']:,}",
            ]
        )
    opened_s, checked_s, opened_mib, used_mib = result["index"]
    first = {
        "title": "Two ranks with two loading processes each, from the command to the first step; "
        f"median (least to most) of {len(found['runs'])} starts. Files are in the page cache, "
        "memory is a process's share (PSS), questions are system calls that name the data.",
        "columns": [
            "",
            "images",
            "first step [s]",
            "a rank [MiB]",
            "a loading process [MiB]",
            "questions",
        ],
        "rows": rows,
    }
    readers = next(iter(result["reading"].values()))
    rounds = len(readers["folder"])
    second = {
        "title": f"An index of 10,000,000 images opens in {opened_s:.2f} s ({checked_s:.2f} s with "
        f"its checksum) and takes {opened_mib:.0f} MiB of a rank's own memory, {used_mib:.0f} MiB "
        "with split and order. Reading JPEG files in random order with "
        f"{WORKERS} loading processes: samples/s over those of `--data imagefolder`, median "
        f"(least to most) of {rounds} rounds; cold: with an empty page cache.",
        "columns": ["", *result["reading"]],
        "rows": [
            [
                READERS[reader],
                *(
                    spread(ratios(runs[reader], runs["folder"]))
                    for runs in result["reading"].values()
                ),
            ]
            for reader in readers
            if reader != "folder"
        ],
    }
    *_, runs = result["ranks"].values()
    third = {
        "title": f"Ranks of check_network take turns on {os.cpu_count()} cores; with a core each "
        f"they would meet sooner. Median (least to most) of {len(runs)} starts.",
        "columns": ["ranks", "all have met [s]", "their launcher [MiB]", "a rank [MiB]"],
        "rows": [
            [
                ranks,
                spread([run["met_s"] for run in runs]),
                f"{statistics.median(run['launcher_mib'] for run in runs):.0f}",
                f"{statistics.median(run['rank_mib'] for run in runs):.0f}",
            ]
            for ranks, runs in result["ranks"].items()
        ],
    }
    return [first, second, third]


def on_page(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the rows of 100,000 images and the table of ranks, which the JSON file has."""
    starts, reading, _ = result["tables"]
    _, some, _ = (f"{count:,}" for count in COUNTS)
    shown = [row for row in starts["rows"] if row[1] != some]
    runs = len(next(iter(result["starts"].values()))["runs"])
    rounds = len(next(iter(result["reading"].values()))["folder"])
    first = (
        "Two ranks with two loading processes each, files in the page cache; median (least to "
        f"most) of {runs} starts. Questions are system calls that name the data."
    )
    second = (
        "Reading JPEG files in random order: samples/s over those of `--data imagefolder`, median "
        f"(least to most) of {rounds} rounds; cold: with an empty page cache."
    )
    return [{**starts, "title": first, "rows": shown}, {**reading, "title": second}]


def draw(result: dict[str, Any], path: Path) -> None:
    """Time to the first step by the number of images; each start is a point."""

    def plot(axes: Any) -> None:
        for kind, label in STARTS.items():
            points = [
                (
                    count,
                    [run["first_step_s"] for run in result["starts"][f"{kind} {count}"]["runs"]],
                )
                for count in COUNTS
            ]
            (line,) = axes.plot(
                [count for count, _ in points],
                [statistics.median(runs) for _, runs in points],
                "-",
                label=label.replace("`", ""),
            )
            for count, runs in points:
                axes.plot([count] * len(runs), runs, "o", alpha=0.5, color=line.get_color())
        axes.set(xscale="log", xlabel="images", ylabel="to the first step [s]", ylim=(0, None))
        axes.legend()

    save_figure(path, plot)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ResourceWarning)  # WebDataset leaves files open
    task, *words = sys.argv[1:]
    if task == "open":
        print(open_index(Path(words[0])))
    else:
        print(speed_of_reader(words[0], Path(words[1]), int(words[2]), int(words[3])))
