"""Show the classes of images, by the model of a finished run: `predict RUN FILE_OR_FOLDER...`.

    make predict RUN=runs/ddp_launch/RUN INPUT=photos            a folder, at any depth
    python -m recipes predict RUN one.jpg two.jpg --top-k 5      files
    python -m recipes predict RUN photos --json >classes.jsonl   one JSON object per image

Each image is prepared as in the evaluation of the training (RUN/preprocessing.json), and the
probabilities are the same. The results go to stdout, everything else to stderr; at the end of a
folder, that is the number of images per class. An image that cannot be decoded is named and the
others are predicted; the exit status is then 1.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from common.data.batches import DeviceBatches
from common.data.decode import SUFFIXES, decoded, is_image
from common.data.image_folder import images_and_others, left_out
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.group.devices import choose_device, device_in_words
from common.launch.capacity import usable_cores
from common.launch.ranks import Ranks
from common.launch.report import say
from common.masking import printable
from common.parse import given_path
from common.reading import refuse_closed
from common.run.options import RunOptions
from common.seeds import set_determinism
from tools.command import Parser, attempt, log_to_stderr
from tools.trained import Trained, add_weights, read, refuse_unusable

BATCH = 32
"""Images that the model sees at once."""


def listed(inputs: Sequence[Path], channels: int) -> tuple[list[Path], list[Path]]:
    """The images to predict, in the order given, those of a folder sorted; and the other files.

    Raises:
        InputError: an input does not exist, may not be read, is no file, no image, or a folder
            without images; or the model takes grey images and one has colours.
    """
    paths: list[Path] = []
    others: list[Path] = []
    for given in inputs:
        refuse_closed("the input", given)
        if not given.exists():
            raise InputError(f"{given} does not exist")
        if given.is_dir():
            found, more = images_and_others(given)
            others += more
        elif not given.is_file():  # opening a pipe waits for its writer
            raise InputError(f"{given} is no file, but a pipe, a socket or a device: leave it out")
        elif is_image(given.name):
            found = [given]
        else:
            raise InputError(
                f"{given} is not an image by its name: training takes files that end in "
                f"{', '.join(sorted(SUFFIXES))}, and so does predict: convert or rename it"
            )
        refuse_unusable(found, channels, named=not given.is_dir())
        paths += found
    return paths, others


def prepared(path: Path, run: Trained) -> Tensor | str:
    """The image as bytes (channels, side, side), or why it cannot be decoded."""
    try:
        return run.prepared(decoded(path))
    except PermissionError as error:
        return f"{path} cannot be read ({error.strerror})"
    except Exception as error:  # Pillow's decoders raise many types
        return f"{path} cannot be decoded ({' '.join(str(error).split())})"


def batches_of(paths: Sequence[Path], run: Trained) -> Iterator[tuple[list[Path], list[Any]]]:
    """Paths and what `prepared` says of them; the next batch is decoded ahead, on all cores."""
    parts = [list(paths[start : start + BATCH]) for start in range(0, len(paths), BATCH)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        load = partial(pool.map, partial(prepared, run=run))
        ahead = load(parts[0])
        for part, following in pairwise([*parts, []]):
            now, ahead = ahead, load(following)
            yield part, list(now)


def refuse_not_finite(logits: Tensor, paths: Sequence[Path], weights: Path) -> None:
    """Raise InputError if the model's answer (images, classes) to an image is not finite."""
    finite = logits.isfinite().all(1).tolist()
    if not all(finite):
        raise InputError(
            f"the model's answer to {paths[finite.index(False)]} is not finite with {weights}: "
            "give other weights"
        )


def row(path: Path, ranking: list[tuple[str, float]], widths: tuple[int, int]) -> str:
    """A line of the table."""
    (best, probability), *others = [(printable(name), value) for name, value in ranking]
    then = ", ".join(f"{name} {value:.4f}" for name, value in others)
    line = f"{printable(path):<{widths[0]}}  {best:<{widths[1]}}  {probability:>11.4f}  {then}"
    return line.rstrip()


def entry(path: Path, ranking: list[tuple[str, float]]) -> str:
    """A line of --json."""
    top = [{"class": name, "probability": probability} for name, probability in ranking]
    content = {"file": str(path), **top[0], "top": top}
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def show(text: str, stream: TextIO) -> None:
    """Write a text without damage to the progress bar."""
    if sys.stderr.isatty():
        tqdm.write(text, stream)
    else:
        print(text, file=stream, flush=True)


@torch.inference_mode()
def predict(given: argparse.Namespace) -> int:
    """Print the classes of all images; returns the exit status."""
    if given.top_k < 1:
        raise InputError(f"--top-k must be at least 1, got {given.top_k}")
    log_to_stderr()
    run = read(given.run)
    given.weights = run.chosen(given)
    paths, others = listed(given.input, run.channels)
    set_determinism(**run.options(RunOptions, cpu_threads=usable_cores()).determinism)
    device = choose_device(given.device, Ranks())
    model, dtype = run.model(given.weights, device)
    seen, classes = run.preprocessing, run.classes
    prepare = DeviceBatches([], device, dtype, seen["mean"], seen["std"]).prepare
    say(f"{run.config['model']} of {run.folder}, {device_in_words(given.device, device)}")
    if others:
        say(left_out(others))
    widths = max(len(printable(p)) for p in paths), max(5, *(len(printable(c)) for c in classes))
    if not given.json:
        print(f"{'file':<{widths[0]}}  {'class':<{widths[1]}}  probability  then")
    faults: list[str] = []
    counts: Counter[str] = Counter()
    folders = any(path.is_dir() for path in given.input)
    bar = tqdm(
        total=len(paths),
        unit="image",
        disable=not folders,
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
    )
    for part, images in batches_of(paths, run):
        for fault in (image for image in images if isinstance(image, str)):
            faults.append(fault)
            show(f"warning: {printable(fault)}", sys.stderr)
        sound = [pair for pair in zip(part, images, strict=True) if isinstance(pair[1], Tensor)]
        if sound:
            logits = model(prepare(torch.stack([image for _, image in sound])))
            refuse_not_finite(logits, [path for path, _ in sound], given.weights or run.own_weights)
            best = logits.double().softmax(1).topk(min(given.top_k, len(classes)))
            rankings = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            lines = []
            for (path, _), (values, indices) in zip(sound, rankings, strict=True):
                ranking = [(classes[i], p) for i, p in zip(indices, values, strict=True)]
                lines.append(entry(path, ranking) if given.json else row(path, ranking, widths))
            show("\n".join(lines), sys.stdout)
            counts.update(classes[indices[0]] for indices in best.indices.tolist())
        bar.update(len(part))
    bar.close()
    if folders:
        counted = (f"  {count:>7}  {printable(name)}" for name, count in counts.most_common())
        say("\n".join(["images per class:", *counted]))
    if faults:
        say(
            f"error: {len(faults)} of {len(paths)} images were not predicted; the first is "
            f"{printable(faults[0])}: remove or replace it"
        )
    return STATUS_FAILED if faults else STATUS_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("predict", __doc__)
    parser.add_argument("run", type=given_path, help="folder of a finished run")
    parser.add_argument(
        "input", type=given_path, nargs="+", help="image files, and folders of them"
    )
    parser.add_argument(
        "--top-k", type=int, default=3, help="most likely classes to show; default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per image")
    add_weights(parser)
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU if there is one; default %(default)s",
    )

    return attempt(lambda: predict(parser.parse_args(list(arguments))))
