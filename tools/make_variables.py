"""Refuse variables of a make command that its targets do not use. The Makefile calls this file.

It needs any python3 and no package: it runs before anything is installed.
"""

import difflib
import re
import sys
from pathlib import Path


def used(text: str) -> "dict[str, set[str]]":
    """Name of each target of a Makefile to the documented variables that its commands use."""
    text = text.replace("\\\n", " ")
    values = re.findall(r"(?m)^(?:export )?([A-Z_]+) *[:?]?= *(.*)", text)
    names = set(re.findall(r"\b([A-Z_]+)=", "".join(re.findall(r"(?m)^#: .*", text))))

    def inside(words: str, seen: "set[str]") -> "set[str]":
        for name in set(re.findall(r"\$[({](?:or )?([A-Z_]+)", words)) - seen:
            seen.add(name)
            for variable, value in values:
                if variable == name:
                    inside(value, seen)
        return seen

    blocks = re.findall(r"(?m)^([a-z-]+):(?!=)(.*(?:\n\t.*)*)", text)
    return {target: inside(block, set()) & names for target, block in blocks}


def refusal(text: str, goals: "list[str]", given: "list[str]") -> str:
    """Why `make GOALS` with variables of the names `given` cannot be meant; else an empty text."""
    targets = used(text)
    if not {*goals} <= {*targets}:
        return ""  # make itself says that there is no such target, or what it is called now
    known = {name for names in targets.values() for name in names}
    here = {name for goal in goals for name in targets.get(goal, ())}
    for name in given:
        near = difflib.get_close_matches(name.upper(), sorted(known), n=1)
        if name not in known and near:
            return f"make knows no variable {name}: did you mean {near[0]}?"
        if name not in known:
            option = name.lower().replace("_", "-")
            return f'make knows no variable {name}: give options as ARGS="--{option} ..."'
        if name not in here:
            uses = f"uses {', '.join(sorted(here))}" if here else "uses no variables"
            return f"make {' '.join(goals)} does not use {name}: it {uses}"
    return ""


if __name__ == "__main__":
    makefile, goals, *given = sys.argv[1:]
    why = refusal(Path(makefile).read_text(), goals.split() or ["help"], given)
    if why:
        sys.exit(f"error: {why}")
