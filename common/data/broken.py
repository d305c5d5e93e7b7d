"""What is said of a sample that a user's data set cannot give, or of samples that fit no batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import InputError, SampleError, TrainingError
from common.hints import hint

_PAGE = "docs/bring-your-own.md"


def read_sample(source: Any, index: int) -> Any:
    """`source[index]`.

    Raises:
        TrainingError: it is None, or `source` failed; the message names the sample.
    """
    sample_name = f"sample {index} of {type(source).__name__}"
    try:
        sample = source[index]
    except (InputError, TrainingError):  # says itself what to do
        raise
    except Exception as error:
        advice = hint(f"{type(error).__name__} {error}") or "repair it"
        raise SampleError(
            f"{sample_name} cannot be read ({_said(error)}): {advice}, or leave its index out of "
            "Samples(...)"
        ) from error
    if sample is None:
        raise TrainingError(
            f"{sample_name} is None: let __getitem__ return tensors, arrays or numbers, or leave "
            "this index out of Samples(...)"
        )
    return sample


def make_batch(
    collate: Callable[[list[Any]], Any], samples: list[Any], indices: Sequence[int], source: Any
) -> Any:
    """`collate(samples)`; `indices` are those of the samples in `source`.

    Raises:
        SampleError: `collate` failed; the message names the samples that do not fit. Or it gave
            more or fewer samples than it got.
    """
    try:
        batch = collate(samples)
    except (InputError, TrainingError):
        raise
    except Exception as error:
        by_index = dict(zip(indices, samples, strict=True))
        why = _why_no_batch(collate, by_index, type(source).__name__)
        raise SampleError(why or f"the collate function failed: {_said(error)}") from error
    shapes = [tuple(part.shape) for part in tree_leaves(batch) if isinstance(part, Tensor)]
    if not any(len(samples) in shape for shape in shapes):
        found = f"tensors of the shapes {', '.join(map(str, shapes))}" if shapes else "no tensor"
        raise SampleError(
            f"the collate function of {type(source).__name__} got {len(samples)} samples and gave "
            f"{found}: it must give each sample once; leave samples out by their index in "
            f"Samples(...) ({_PAGE}, Samples)"
        )
    return batch


def refuse_other_labels(batch: Any, classes: int, indices: Sequence[int], source: Any) -> None:
    """Raise SampleError for a label of a batch (inputs, labels) that is none of the classes.

    torch leaves a label of -100 out of the loss, and says of another one only its value. Labels of
    several numbers per sample, and of no classes (`classes` is 0), are not looked at.
    """
    if not classes or not isinstance(batch, list | tuple) or len(batch) != 2:
        return
    labels: Any = batch[1]
    if isinstance(labels, Tensor):
        if labels.shape != (len(indices),):
            return
        labels = labels.tolist()
    known = range(classes)
    if not isinstance(labels, list | tuple) or len(labels) != len(indices):
        return
    for index, label in zip(indices, labels, strict=True):
        if isinstance(label, str) or (isinstance(label, int) and label not in known):
            raise SampleError(
                f"the label of sample {index} of {type(source).__name__} is {label!r}, but Data "
                f"has {classes} class_names: give the number of its class, 0 to {classes - 1}, or "
                "leave the sample's index out of Samples(...)"
            )


def _why_no_batch(collate: Callable[[list[Any]], Any], samples: dict[int, Any], name: str) -> str:
    """A sample that makes no batch alone is the cause, or else two samples of different shapes."""
    for index, sample in samples.items():
        try:
            collate([sample])
        except Exception as error:
            return (
                f"sample {index} of {name} makes no batch ({_said(error)}): it is "
                f"{_described(sample)}; let __getitem__ return tensors, arrays or numbers ({_PAGE})"
            )
    (first, one), *others = ((index, _described(sample)) for index, sample in samples.items())
    for index, other in others:
        if other != one:
            return (
                f"samples {first} and {index} of {name} do not fit into one batch: they are {one} "
                f"and {other}; return samples of one shape, or give Samples(...) a collate "
                f"function that pads them ({_PAGE}, Padding)"
            )
    return ""


def _said(error: Exception) -> str:
    """Type and text of an error, in one short line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _described(sample: Any) -> str:
    """A sample's structure, with the shapes of its tensors, in one short line."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{tuple(sample.shape)} {str(sample.dtype).removeprefix('torch.')}"
    if isinstance(sample, dict):
        text = "{" + ", ".join(f"{k}: {_described(v)}" for k, v in sample.items()) + "}"
    elif isinstance(sample, tuple | list):
        text = f"[{', '.join(map(_described, sample))}]"
    else:
        text = type(sample).__name__
    return text if len(text) <= 200 else f"{text[:200]} ..."
