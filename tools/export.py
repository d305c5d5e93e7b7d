"""Write a finished run's model as a file for other programs, and check what that file answers.

    make export RUN=runs/ddp_launch/RUN TO=model.pt2        torch.export.load reads it, without us
    make export RUN=runs/ddp_launch/RUN TO=model.onnx       ONNX Runtime and others read it
    make export RUN=runs/ddp_launch/RUN TO=model.safetensors      names and tensors, no code

The end of TO decides the format. .pt2 needs nothing more; for the others: pip install onnx
onnxscript onnxruntime, or pip install safetensors. The file is loaded again and asked about up to
100 of the run's held-out samples: its classes must be the trained model's, and its probabilities,
too, to 1e-5. (Of a model with a score of its own, the outputs, to 1e-5 of the largest.) If they are
not, the samples are named, no file is left, and the status is 1.

A .pt2 or .onnx takes batches of any size, (samples, channels, height, width) for images, and gives
logits (samples, classes). TO.preprocessing.json, the run's own, says how to prepare an image.
"""

import argparse
import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.data.batches import DeviceBatches
from common.errors import InputError, TrainingError
from common.group.process_group import process_group
from common.launch.capacity import usable_cores
from common.launch.ranks import Ranks
from common.parse import given_path
from common.run.options import RunOptions
from common.seeds import set_determinism
from common.training.evaluation import score_classes
from common.writing import writing
from tools.command import Parser, attempt, log_to_stderr
from tools.evaluate import load_classifier
from tools.mistakes import name_of
from tools.own import Parts, load_own, recipe_of
from tools.trained import add_weights, load_all, read, read_config

SAMPLES, TOLERANCE = 100, 1e-5

Loaded = Callable[[Tensor], Tensor]
"""A model that was loaded from its file: inputs to outputs."""


def to_safetensors(model: nn.Module, inputs: Tensor, path: Path) -> Loaded:
    """Write the state_dict; load it into a copy of the model."""
    from safetensors.torch import save

    entries = model.state_dict().items()  # which may share memory: the format refuses that
    path.write_bytes(save({name: value.clone().contiguous() for name, value in entries}))
    again = copy.deepcopy(model)
    load_all(again, path, "the model", "the run")
    return again


def to_pt2(model: nn.Module, inputs: Tensor, path: Path) -> Loaded:
    """Write what torch.export makes of the model."""
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: _samples()},))
    torch.export.save(program, path)
    return torch.export.load(path).module()


def to_onnx(model: nn.Module, inputs: Tensor, path: Path) -> Loaded | None:
    """Write what torch.onnx makes of the model. None: nothing is here to run it."""
    shapes, names = ({0: _samples()},), {"input_names": ["input"], "output_names": ["output"]}
    more: Any = {"dynamo": True, "external_data": False, "verbose": False, **names}
    torch.onnx.export(model, (inputs,), path, dynamic_shapes=shapes, **more)
    if not find_spec("onnxruntime"):
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda asked: torch.from_numpy(session.run(None, {"input": asked.numpy()})[0])


def _samples() -> Any:
    return torch.export.Dim("samples")


FORMATS: dict[str, tuple[Callable[[nn.Module, Tensor, Path], Loaded | None], Sequence[str]]] = {
    ".safetensors": (to_safetensors, ["safetensors"]),
    ".pt2": (to_pt2, []),
    ".onnx": (to_onnx, ["onnx", "onnxscript"]),
}
"""Suffix to what writes the file, and the packages that it needs."""


def held_out_answers(parts: Parts) -> tuple[Tensor, Tensor]:
    """What the trained model is asked, and what it answers, for the first held-out samples.

    Returns:
        Inputs (samples, ...), as the model sees them; outputs (samples, ...).

    Raises:
        InputError: the model takes or gives anything but one tensor.
    """
    seen: list[Any] = []
    hook = parts.model.register_forward_hook(lambda _model, asked, said: seen.append((asked, said)))
    prepare = DeviceBatches([], torch.device("cpu"), parts.dtype, parts.mean, parts.std).prepare
    keys = [(0, place) for place in range(min(SAMPLES, len(parts.val)))]
    parts.score(parts.model, prepare(parts.val.__getitems__(keys)))
    hook.remove()
    asked, said = seen[0]
    if len(asked) != 1 or not isinstance(asked[0], Tensor) or not isinstance(said, Tensor):
        raise InputError(
            "the model takes or gives more than one tensor, and export writes models of one input "
            "and one output: load its weights as docs/bring-your-own.md shows"
        )
    return asked[0], said


def differences(parts: Parts, expected: Tensor, found: Tensor) -> tuple[list[str], float]:
    """Samples on which two models disagree, in words, and the largest difference of all.

    Args:
        parts: of the run.
        expected: the trained model's outputs (samples, ...).
        found: the other one's.
    """
    expected, found = expected.double(), found.double()
    classes = parts.score is score_classes
    if found.shape != expected.shape:
        return [f"all (shape {tuple(found.shape)}, not {tuple(expected.shape)})"], float("inf")
    ours, theirs = ((x.softmax(1) if classes else x) for x in (expected, found))
    scale = 1.0 if classes else max(1.0, float(ours.abs().max()))
    apart = (ours - theirs).abs().flatten(1).amax(1)
    wrong = ~(apart <= TOLERANCE * scale)  # also if it is NaN
    if classes:
        chosen = ours.gather(1, theirs.argmax(1, keepdim=True))[:, 0]
        wrong |= ours.amax(1) - chosen > TOLERANCE  # else two classes are as likely
    said = []
    for place in wrong.nonzero()[:, 0].tolist():
        (name,) = name_of(parts.val, place).values()
        said.append(f"{name} (by {float(apart[place]):.1e})")
    return said, float(apart.max())


@torch.no_grad()
def export(given: argparse.Namespace) -> None:
    """Write, check and publish the file, as a command line says.

    Raises:
        InputError: no such run, format, package or place.
        TrainingError: the model cannot be written in this format, or the file answers otherwise.
    """
    log_to_stderr()
    target: Path = given.to
    if target.suffix not in FORMATS:
        raise InputError(f"{target} ends in none of {', '.join(FORMATS)}, which name the format")
    write, packages = FORMATS[target.suffix]
    if lacking := [name for name in packages if not find_spec(name)]:
        raise InputError(f"{target} needs {' and '.join(lacking)}: pip install {' '.join(lacking)}")
    beside = target.with_name(f"{target.name}.preprocessing.json")
    if there := [path for path in (target, beside) if os.path.lexists(path)]:
        raise InputError(f"{there[0]} exists: remove it, or choose another name")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent} is no folder: make it first")
    recipe = recipe_of(read_config(given.run))
    run = read(given.run, own=bool(recipe))
    given.weights, given.num_workers = run.chosen(given), 0
    options, ranks, device = run.options(RunOptions), Ranks(), torch.device("cpu")
    set_determinism(**{**options.determinism, "cpu_threads": usable_cores()})
    with process_group(ranks, device, "gloo", options.timeout_s):
        if recipe:
            parts = load_own(recipe, run, given.weights, ranks, device)
        else:
            parts, _ = load_classifier(given, run, ranks, device)
    inputs, expected = held_out_answers(parts)
    # Two, or torch would take the number as fixed; of zeros, because a .pt2 keeps them.
    example = torch.zeros_like(torch.cat([inputs, inputs])[:2])
    with writing(target), tempfile.TemporaryDirectory(".export", dir=target.parent) as folder:
        file = Path(folder) / target.name
        try:
            with warnings.catch_warnings():  # of the exporters, about themselves
                warnings.simplefilter("ignore")
                loaded = write(parts.model, example, file)
                found = loaded(inputs) if loaded else None
        except (InputError, OSError):
            raise
        except Exception as error:  # they raise many types
            why = " ".join(str(error).split())[:200]
            raise TrainingError(
                f"{target.suffix} cannot hold this model ({type(error).__name__}: {why}): take "
                "another format; .safetensors holds the weights of every model"
            ) from error
        checked = "not compared with the run: pip install onnxruntime"
        if found is not None:
            said, apart = differences(parts, expected, found)
            if said:
                raise TrainingError(
                    f"the model in {target} does not answer as the trained one on {len(said)} of "
                    f"{len(inputs)} held-out samples: {', '.join(said[:5])}; it is not kept: take "
                    "another format"
                )
            checked = f"{len(inputs)} held-out samples: answers differ by {apart:.1e} at most"
        files = {file: target}
        if run.preprocessing:
            shutil.copyfile(run.folder / "preprocessing.json", file.with_name("beside"))
            files = {file.with_name("beside"): beside, **files}
        for made, place in files.items():
            made.replace(place)
    print(f"{target}: {checked}")
    if run.preprocessing:
        print(f"{beside}: how to prepare an image")


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("export", __doc__)
    parser.add_argument("run", type=given_path, help="folder of a finished run")
    parser.add_argument("to", type=given_path, metavar="TO", help="the file; it must not exist")
    add_weights(parser)
    parser.add_argument(
        "--data-path", type=given_path, help="the run's photos, if they were moved; or others"
    )
    return attempt(lambda: export(parser.parse_args(list(arguments))))
