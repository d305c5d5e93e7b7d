"""Which options decide a run's numbers, and whether two runs have the same ones."""

from dataclasses import fields
from typing import Any, get_type_hints

from common.errors import InputError
from common.group.collectives import agreed, broadcast

Options = dict[str, Any]
"""Values by name, as in config.json."""
CONTENTS = ", contents "
"""In a fingerprint of photos, between the hashes of their paths and of their bytes."""


def decisive(options: Options, config: Any) -> Options:
    """The recipe's name and those of its `options` that decide the numbers.

    Args:
        options: of the recipe.
        config: the recipe's config, or its class, whose fields say which options may change.
    """
    kinds = get_type_hints(config if isinstance(config, type) else type(config)).values()
    found = [o for kind in kinds for o in fields(kind) if "may_change" not in o.metadata]
    values = {name: options.get(name) for name in ("recipe", *(option.name for option in found))}
    for option in found:
        if same := option.metadata.get("same_as"):
            values[option.name] = same.get(values[option.name], values[option.name])
    return values


def differences(theirs: Options, ours: Options) -> dict[str, tuple[Any, Any]]:
    """Each name whose values differ, with both values; None stands for a missing one."""
    pairs = {name: (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    return {name: (there, here) for name, (there, here) in pairs.items() if there != here}


def refuse_another_run(theirs: Options, ours: Options, what: str, more: str = "") -> None:
    """Raise InputError if `what`, which has the options `theirs`, is not of this run."""
    if found := _in_words(theirs, ours):
        raise InputError(f"{what} is of another run ({found}): choose another --output-dir{more}")


def refuse_unlike_rank_0(ours: Options, what: str) -> None:
    """Raise InputError on every rank if any rank has other options than rank 0. A collective."""
    rank_0 = broadcast(ours)
    with agreed():
        if found := _in_words(rank_0, ours):
            raise InputError(f"{what}: {found}")


def _in_words(theirs: Options, ours: Options) -> str:
    found = differences(theirs, ours).items()
    return "; ".join(f"{name} {there!r} there, {here!r} here" for name, (there, here) in found)
