"""Evaluate a finished run exactly: every sample counted once, on any number of ranks.

    make evaluate RUN=runs/ddp_launch/RUN                           the run's held-out samples
    python -m recipes evaluate RUN --data-path photos               another folder of photos
    python -m recipes evaluate RUN --best                           the best epoch's weights
    python -m recipes evaluate RUN --sheet --nproc 1                and a picture of mistakes

Without other data or weights, the result is the one in RUN/summary.json, to the bit and on any
number of ranks; other bits end with status 1. If the device, a library's version or the CPU's type
is not the run's, the last bits may differ, which a message says. A folder of photos has one
sub-folder per class, named as in the training; all its photos are evaluated. If the folder is the
run's own data at another place, only its held-out samples are. A model of fsdp is evaluated on the
text that its run held out, and gives its loss and bits per character. For recipes with own data or
an own model see docs/bring-your-own.md.

Of a classifier, a table shows each class's samples and accuracy, and in column N how many of them
were taken for class N; with more than 20 classes, the least accurate ones and the most frequent
confusions. --json has the same numbers. RUN/evaluation, or the folder --output, gets confusion.png
and mistakes.jsonl: the file (or its index in the data), true class, predicted class and its
probability, the most confident mistake first. --sheet adds worst.png, the first 36 of them.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common import cli, log
from common.data.batches import DeviceBatches
from common.data.datasets import Data, DataOptions, LoaderOptions, load_data
from common.data.decode import faults_of, refuse_faults
from common.data.image_folder import (
    ImageFiles,
    class_names,
    images_and_others,
    left_out,
    listed,
    refuse_images_twice,
    warn_of_loose_images,
)
from common.data.loaders import make_loader
from common.data.packed import INDEX
from common.data.stream import FixedBatches, Samples, eval_batch_size
from common.data.workers import choose_num_workers
from common.errors import InputError, TrainingError
from common.fingerprint import fingerprint
from common.group.collectives import agreed, gather
from common.group.devices import choose_device, device_in_words
from common.group.process_group import process_group
from common.group.rendezvous import refuse_together
from common.launch.capacity import refuse_more_than_fit
from common.launch.process import run_rank
from common.launch.ranks import Ranks, resolve
from common.launch.start import LaunchOptions, launch
from common.manifest import describe_machine
from common.masking import printable
from common.output_folder import refuse_closed_to_writing
from common.parse import given_path
from common.reading import refuse_closed
from common.run.claim import refuse_in_data
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.stack import running_versions
from common.terminal import set_up_logs
from common.training.evaluation import evaluate, score_classes
from common.training.models import read_weights
from common.weights import weights_sha256, without_prefix
from common.writing import fix
from tools.command import Parser, log_to_stderr, open_stdout, printing
from tools.mistakes import Answers, Result, picture
from tools.own import Parts, load_own, recipe_of
from tools.trained import Trained, add_weights, read, read_config, refuse_unusable


def held_out(run: Trained, options: DataOptions, ranks: Ranks) -> Data:
    """The run's own data. Calls collectives.

    Raises:
        InputError: `options` name other data than the run's.
    """
    data = load_data(options, run.options(RunOptions).seed, ranks)
    refuse_other_data(run, data, options)
    return data


def refuse_other_data(run: Trained, data: Data, options: DataOptions) -> None:
    """Raise InputError for `data` that are not the run's. Calls a collective."""
    with agreed():
        if not run.trained_on(data):
            where = f" in {options.data_path}" if options.data_path else ""
            raise InputError(
                f"--data {options.data}{where} is not the data that {run.folder} was trained on "
                "(data_fingerprint in manifest.json), or has changed since: restore it, or give "
                "--data-path"
            )


def validation(run: Trained, data: Data) -> Samples:
    """The held-out samples of the run's own `data`. Calls a collective.

    Raises:
        InputError: preprocessing.json says other things of them.
    """
    with agreed():
        for key, value in json.loads(json.dumps(data.preprocessing)).items():
            if run.preprocessing.get(key) != value:
                raise InputError(
                    f'{run.folder}/config.json: with its options "{key}" of the data is {value}, '
                    f"but {run.preprocessing.get(key)} in preprocessing.json: restore the file, or "
                    "train again"
                )
    return data.val


def photos(run: Trained, folder: Path, ranks: Ranks) -> Samples:
    """All images of a folder with one sub-folder per class. Calls a collective.

    Raises:
        InputError: no such sub-folders, other classes, an image that the model cannot take, or a
            folder that may not be read.
    """
    with agreed():
        refuse_closed("--data-path", folder)
        names = class_names(folder) if folder.is_dir() else []
        if not names:
            raise InputError(f"--data-path {folder} has no sub-folders: make one per class")
        if unknown := set(names) - set(run.classes):
            raise InputError(
                f"--data-path {folder} holds {', '.join(sorted(unknown))}, but the classes of the "
                f"run are {', '.join(run.classes)}"
            )
        if missing := set(run.classes) - set(names):
            log.warning(f"--data-path {folder} has no images of {listed(missing)}")
        refuse_images_twice([folder], names)
        warn_of_loose_images(folder)
        found = {name: images_and_others(folder / name) for name in names}
        files = [(path, name) for name, (images, _) in found.items() for path in images]
        if others := [path for _, more in found.values() for path in more]:
            log.info(left_out(others))
        mine = files[ranks.rank :: ranks.world_size]
        refuse_unusable([path for path, _ in mine], run.channels)
        faults = faults_of(mine, show_progress=ranks.is_main)
    faults = [fault for part in gather(faults) for fault in part]
    with agreed():
        if ranks.is_main:
            refuse_faults(faults)
    labelled = [(path, run.classes.index(name)) for path, name in files]
    return Samples(ImageFiles(labelled, run.prepared), range(len(files)), 0)


def samples_of(
    run: Trained, options: DataOptions, folder: Path | None, ranks: Ranks
) -> tuple[Samples, bool]:
    """The samples to evaluate, and whether they are the run's own. Calls collectives."""
    if folder is None:
        return validation(run, held_out(run, options, ranks)), True
    if options.data_path is not None:
        if os.access(folder / INDEX, os.F_OK):
            options = replace(options, data="packed")
        elif options.data == "packed":
            options = replace(options, data="imagefolder")
        options = replace(options, data_path=folder)
        try:
            data = load_data(options, run.options(RunOptions).seed, ranks)
        except InputError:
            if options.data == "packed":
                raise
        else:
            # Images of the run's paths and sizes are its own, some of which it was trained on.
            own = any(gather(run.trained_on(data, contents=False)))
            if own or options.data == "packed":
                refuse_other_data(run, data, options)
                return validation(run, data), True
    return photos(run, folder, ranks), False


def load_classifier(
    given: argparse.Namespace, run: Trained, ranks: Ranks, device: torch.device
) -> tuple[Parts, bool]:
    """A classifier of images, and whether the samples are the run's own. Calls collectives."""
    own_data = {"download": False, "verify_images": False, "data_local": None}
    options = run.options(DataOptions, num_workers=given.num_workers, **own_data)
    with agreed():
        model, dtype = run.model(given.weights, device)
    val, own = samples_of(run, options, given.data_path, ranks)
    seen = run.preprocessing
    return Parts(val, seen["mean"], seen["std"], model, dtype, score_classes, run.classes), own


def refuse_output(given: argparse.Namespace, run: Trained, parts: Parts) -> None:
    """Make the folder --output, before anything is computed.

    Raises:
        InputError: it cannot be made, would be a class of the photos, or nothing can be in it:
            the model is no classifier, or for --sheet the samples are no images.
    """
    if (given.output or given.sheet) and parts.score is not score_classes:
        raise InputError(
            f"--output and --sheet are for classifiers, and {run.config['recipe']} has a score of "
            "its own: leave them out"
        )
    if given.sheet:
        picture(parts.val, 0)
    if given.output:
        if given.data_path or run.config.get("data") == "imagefolder":
            data_path = given.data_path or Path(run.config["data_path"])
            refuse_in_data(given.output, data_path, "--output")
        try:
            given.output.mkdir(parents=True, exist_ok=True)
            refuse_closed_to_writing(given.output)
        except OSError as error:
            raise InputError(
                f"--output {given.output} cannot be made or written ({error.strerror}): "
                f"{fix(error)}, or choose another --output"
            ) from error


def write_files(
    answers: Result, given: argparse.Namespace, run: Trained, samples: Samples, sha256: str
) -> str:
    """Write where the model errs, and say where that is; a line for the terminal.

    Without --output, a run's folder that this user may not write stays as it is.

    Raises:
        TrainingError: a file cannot be written.
    """
    folder = given.output or run.folder / "evaluation"
    try:
        folder.mkdir(exist_ok=True)
        refuse_closed_to_writing(folder)
    except OSError as error:
        log.warning(f"{folder} is not written ({error.strerror}): give --output DIR")
        return ""
    names = ["confusion.png", "mistakes.jsonl", *(["worst.png"] if given.sheet else [])]
    answers.draw(folder / "confusion.png", sha256)
    answers.write_mistakes(folder / "mistakes.jsonl", samples)
    (folder / "worst.png").unlink(missing_ok=True)  # of other mistakes
    if given.sheet:
        answers.draw_worst(folder / "worst.png", samples)
    return f"{folder}: {', '.join(name for name in names if (folder / name).exists())}"


def evaluate_run(given: argparse.Namespace, run: Trained, recipe: Any, ranks: Ranks) -> None:
    """Evaluate as one rank, and print the result; `recipe` is that of `recipe_of`."""
    set_up_logs(ranks)
    if given.json and ranks.is_main:
        log_to_stderr()
    set_determinism(**run.options(RunOptions).determinism)
    device = choose_device(given.device, ranks)
    with process_group(ranks, device, "auto", run.options(RunOptions).timeout_s):
        if recipe:
            parts, own = load_own(recipe, run, given.weights, ranks, device), True
        else:
            parts, own = load_classifier(given, run, ranks, device)
        with agreed():
            if ranks.is_main:
                refuse_output(given, run, parts)
        val, model = parts.val, parts.model
        options = run.options(LoaderOptions, num_workers=given.num_workers)
        keys = FixedBatches(len(val), eval_batch_size(len(val)), ranks.rank, ranks.world_size)
        workers = choose_num_workers(options, val, max(map(len, keys), default=1), device)
        loader = make_loader(val, keys, num_workers=workers, pin_memory=device.type == "cuda")
        batches = DeviceBatches(loader, device, parts.dtype, parts.mean, parts.std)
        answers = Answers(keys) if parts.score is score_classes else None
        found = evaluate(model, batches, len(val), score=answers or parts.score)
        if found.not_finite:
            raise InputError(
                f"val_{found.not_finite[0]} is not finite with {given.weights or run.own_weights}: "
                "give other weights"
            )
        errs = answers.gathered(parts.classes) if answers else None
    result = {
        **{f"val_{name}": mean for name, mean in found.means.items()},
        **({"val_correct": found.correct} if found.correct is not None else {}),
        "val_total": found.total,
    }
    recorded = {name: run.summary.get(name) for name in result}
    if not ranks.is_main:
        return
    compared = ""
    weights = given.weights or run.own_weights
    if own and weights.resolve() == run.own_weights.resolve():
        exact = result != recorded and is_as_recorded(run.manifest, device, ranks)
        exact &= run.config.get("tensor_parallel", 1) == 1  # else its sums were cut otherwise
        compared = verdict(result, recorded, exact=exact)
    # Of the file: the model's own may be rounded, as fsdp's in bf16.
    sha = weights_sha256(without_prefix(read_weights(weights), model.state_dict())[0])
    if given.json:
        more = errs.content if errs else {}
        content = {**result, "held_out": own, "weights_sha256": sha, **more}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    else:
        what = f"held-out samples of {run.folder}" if own else f"images in {given.data_path}"
        where = f"world_size {ranks.world_size}, device {device_in_words(given.device, device)}"
        lines = [f"{found.total} {what}, {where}", ""]
        width = max(12, *map(len, result))
        lines += [f"  {name:<{width}}  {value}" for name, value in result.items()]
        lines = [printable(line) for line in lines]
        lines += ["", *errs.lines()] if errs else []
        lines += ["", printable(compared)] if compared else []
        text = "\n".join(lines)
    with printing():
        print(text, flush=True)
    if errs and (written := write_files(errs, given, run, val, sha)) and not given.json:
        with printing():
            print(f"\n{printable(written)}", flush=True)


def is_as_recorded(manifest: dict[str, Any], device: torch.device, ranks: Ranks) -> bool:
    """Whether one machine does this evaluation, and it and its libraries are those of the run.

    Args:
        manifest: of the run; it describes the first host and rank.
        device: that this rank computes on.
        ranks: of this evaluation.
    """
    now = {**describe_machine(), "fingerprint": fingerprint(device)}
    names = ["fingerprint", "cpu", "gpu", "driver", "lock_sha256", "python", *running_versions()]
    hosts, gpus = (manifest.get(name) for name in ("hosts", "gpus"))
    one_host = isinstance(hosts, list) and len(hosts) == 1
    one_kind = isinstance(gpus, list) and all(name == gpus[0] for name in gpus)
    # Without a lock file, nothing is known of Pillow.
    known = ranks.local_world_size == ranks.world_size and now["lock_sha256"] is not None
    same = all(manifest.get(name) == now[name] for name in names)
    return one_host and one_kind and known and same


def verdict(result: dict[str, Any], recorded: dict[str, Any], *, exact: bool) -> str:
    """Whether the result is the one that the run wrote into its summary.

    Args:
        result: metrics by name.
        recorded: the same in summary.json; None for one that is not there.
        exact: the same bits are to be expected, because nothing known differs from the run.

    Raises:
        TrainingError: it is another one altogether.
    """
    if result == recorded:
        return "the same as in summary.json, to the bit"
    if lacking := [name for name, value in recorded.items() if value is None]:
        return f"summary.json has no {', '.join(lacking)} to compare with: restore it"
    others = ", ".join(f"{n} {value}" for n, value in recorded.items() if value != result[n])
    if exact:
        raise TrainingError(
            f"summary.json has {others}, but the machine and all versions are the run's, which "
            "would give the same bits: a file of the run was altered, or its data or the code; or "
            "a loop of your own evaluates otherwise than ddp_launch's"
        )
    if not all(_near(name, recorded, result) for name in recorded):
        raise TrainingError(
            f"summary.json has {others}, which differ by more than another device or "
            "version of torch explains: a file of the run was altered, or its data"
        )
    return (
        f"summary.json has {others}: another device, CPU or version of torch changes the last bits"
    )


def _near(name: str, recorded: dict[str, Any], result: dict[str, Any]) -> bool:
    """Whether another device explains a number. Of samples it does not: they have no last bits."""
    value = recorded[name]
    if name == "val_total":
        return bool(value == result[name])
    if name == "val_correct":  # follows from the accuracy, which is a mean
        return bool(abs(value - recorded["val_accuracy"] * result["val_total"]) < 0.5)
    return math.isclose(value, result[name], rel_tol=0.05, abs_tol=0.05)


def main(arguments: Sequence[str]) -> int:
    """Run from a command line, as a rank or to start the ranks; returns the exit status."""
    parser = Parser("evaluate", __doc__)
    parser.add_argument("run", type=given_path, help="folder of a finished run")
    parser.add_argument(
        "--data-path", type=given_path, help="folder to evaluate on; default: the run's"
    )
    add_weights(parser)
    parser.add_argument(
        "--nproc", type=int, help="processes; default: one per visible GPU, or 2 on CPUs"
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        help="loading processes per rank; default: for photos one per free CPU core, else 0",
    )
    parser.add_argument("--json", action="store_true", help="the result as a JSON object")
    parser.add_argument(
        "--output",
        type=given_path,
        help="folder of the figure and mistakes.jsonl; default: RUN/evaluation",
    )
    parser.add_argument("--sheet", action="store_true", help="worst.png: the worst 36 mistakes")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: a GPU if there is one; default %(default)s",
    )
    try:
        open_stdout()
        ranks, given = resolve(), parser.parse_args(list(arguments))
        recipe = recipe_of(read_config(given.run))
        run, options = read(given.run, own=bool(recipe)), LaunchOptions(nproc=given.nproc)
        given.weights = run.chosen(given)
        if recipe and given.data_path:
            raise InputError(
                f"--data-path is for photos: {recipe.__name__} makes its own data, and evaluates "
                "the run's held-out samples"
            )
        if ranks.launcher == "none" and (nproc := options.processes(given.device)) > 1:
            refuse_more_than_fit(nproc)
            return launch(["-m", "recipes", "evaluate", *arguments], nproc, options)
    except ValueError as error:
        return cli.refuse(InputError(str(error)))

    def body() -> None:
        try:
            evaluate_run(given, run, recipe, ranks)
        except InputError as error:
            raise refuse_together(error, ranks) from None

    return run_rank(body, ranks)
