"""What is hidden in texts: secrets in commands and diffs; control characters in names from data.

The rule for secrets is broad on purpose: a hidden word too many does no harm, and no list of forms
is complete. docs/use.md says what is promised.
"""

import math
import re
import shlex
from collections import Counter
from contextlib import suppress
from itertools import pairwise

_STRONG = r"[\w-]*(?:token(?!s|iz)|secret|passw|passphrase|pwd|credential|api_?key)[\w-]*"
"""A name whose value is a secret, whatever it looks like."""
_WEAK = (
    r"(?:[\w-]*[_-]|[a-z]*o)?(?:keys?|auth|authorization|sig|signature|login)"
    r"(?![\w-]|\s*[!=]=|\s*in\b)"
)
"""A name whose value is one if it looks like one: `key` is the name of much else."""
_NAME = re.compile(rf"(?i)(?<![\w$-])(?:(?P<strong>{_STRONG})|{_WEAK})")
_OPTION = re.compile(
    rf"(?i)(?<!\S)(['\"]?--(?:[\w-]+\.)*(?:{_STRONG}|{_WEAK})(?:=|\s+))"
    r"(?:'[^']*'|\"[^\"]*\"|\S+)"
)
_WHOLE = re.compile(rf"(?i)--(?:[\w-]+\.)*(?:{_STRONG}|{_WEAK})(?:=|$)")
_KNOWN = re.compile(
    rf"""(?ix)
    ( \w:// ) [^/\s'"]+ (?=@)                                   # the user part of a URL
    | ( [?&;] (?:{_STRONG}|{_WEAK}) = ) [^&\s'";]+               # of its query
    | ( \b authorization ['"]? \s* [:=] \s* ['"]? (?: [a-z]+ [ ] )? ) [^\s'"]+
    | ( \b (?: bearer | basic (?= \s+ [^\s'"]* (?-i: \d | = | [a-z][A-Z] ) ) ) \s+ ) [^\s'"]+
    | ( \b AccountKey= | \b hooks\.slack\.com/services/ ) [^\s;'"]+
    | \b (?: eyJ [\w-]+ | SG ) \. [\w-]{{8,}} \. [\w-]{{8,}}
    | \b (?: gh[pousr]_ | github_pat_ | glpat- | hf_ | xox[abp]- | sk- | AKIA ) [\w-]{{8,}}"""
)
_RUN = re.compile(r"(?<![\w+/=.-])(?<!sha256:)[A-Za-z0-9+_-]{20,}={0,2}(?![\w.])")
_LITERAL = re.compile(r"""(?<!\w)([rbfu]{0,2})("(?:[^"\\\n]|\\.)+"|'(?:[^'\\\n]|\\.)+')""", re.I)
_WORD = re.compile(r"([=:]\s*)(?=\S*\d)(?=\S*[A-Za-z])[^\s\"'(){},.;\[\]]{6,}(?![^\s,;])")
_SET = re.compile(r"^(\W*(?:export\s+)?[\w-]+=)[^\s=\"'({\[]\S*$")
_HEADER = re.compile(
    r"(?:diff --git |index [0-9a-f]|(?:---|\+\+\+) (?:\"?[ab]/|/dev/null)).*|@@ -\S+ \+\S+ @@"
)
_BLOCK = re.compile(r"^\W*(?:async\s+)?(?:def|class|if|elif|else|for|while|with|try|except)\b")


def printable(text: object, keep: str = "") -> str:
    r"""A text with names from data, as one line: line breaks, escape sequences and the like as \n.

    Args:
        text: anything.
        keep: characters that stay.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def masked_command(command: str) -> str:
    """A command line with *** in place of secrets."""
    with suppress(ValueError):  # no quoted words
        for before, word in pairwise(["", *shlex.split(command)]):
            quoted, option = shlex.quote(word), _WHOLE.match(word)
            # Of a quoted word, `_plain` could take the end for another word.
            if quoted != word and (option or _WHOLE.fullmatch(before)):
                command = command.replace(quoted, f"{option[0] if option else ''}***")
    return _plain(command)


def masked_diff(diff: str) -> str:
    """A diff, or any code, with *** in place of secrets, line by line."""
    lines, state = [], _Lines()
    for line in diff.split("\n"):
        lines.append(state.masked(line))
    return "\n".join(lines)


class _Lines:
    """What the lines so far say of the next one."""

    def __init__(self) -> None:
        self.end = ""
        """What ends a secret of several lines: quotes, or a private key's last line."""
        self.open = 0
        """Brackets that are open since a secret's name."""
        self.next = False
        """Whether the next line holds its value."""
        self.strong = False
        """Whether that name is a strong one."""

    def masked(self, line: str) -> str:
        """A line without the secrets in it."""
        if found := _HEADER.match(line):
            self.end, self.open, self.next = "", 0, False
            # git shows the line of code under which a change stands.
            return found[0] + _Lines().masked(line[found.end() :])
        mark = line[: line[:1] in ("+", "-", " ")]
        if self.end:
            _, end, rest = line.partition(self.end)
            self.end = "" if end else self.end
            return f"{mark}***{end}{rest}"
        if (key := "PRIVATE KEY-----") in line and "-----END" not in line:
            self.end = "-----END"
            return line[: line.index(key)] + key
        line = _plain(line)
        name, begin, continued = None, len(mark), self.next or self.open > 0
        if not continued:
            if not (names := list(_NAME.finditer(line))):
                return line
            name, begin = names[0], names[0].end()
            self.strong = any(found["strong"] for found in names)
            for text in _LITERAL.finditer(line):
                if text.start() < begin < text.end():  # the name is in a string
                    inside = line[begin : text.end() - 1]
                    if self.strong and re.match(r"\s*[=:]\s*[^\s*]", inside):
                        return f"{line[:begin]}=***{line[text.end() - 1 :]}"
                    begin = text.end()
        head, rest = line[:begin], line[begin:]
        for quotes in ('"""', "'''"):
            if rest.count(quotes) % 2 and not _BLOCK.match(line):
                self.end = quotes
                return f"{head}{rest[: rest.index(quotes)]}{quotes}***"
        hidden = _LITERAL.sub(lambda found: _hidden(found, strong=self.strong), rest)
        if hidden == rest and self.strong:
            hidden = _WORD.sub(r"\1***", rest)
            if self.next and re.fullmatch(r"\s*(- )?\S+\s*", rest):
                hidden = "***"
            if _SET.match(line):
                head, hidden = _SET.sub(r"\1***", line), ""
        code = _LITERAL.sub("", rest).partition("#")[0].rstrip()
        if name and _BLOCK.match(line):
            return head + hidden
        self.open = max(0, self.open + sum(map(code.count, "([{")) - sum(map(code.count, ")]}")))
        self.next = hidden == rest and code.endswith(("=", "\\", ":", "|", ">"))
        return head + hidden


def _hidden(found: "re.Match[str]", *, strong: bool) -> str:
    """A string as it is kept in the line of a secret's name."""
    value = found[2][1:-1]
    if re.fullmatch(r"[A-Z]+(_[A-Z]+)+|\W*", value):  # the name of a variable
        return found[0]
    looks = bool(re.search(r"\d", value) and re.search("[A-Za-z]", value) and len(value) >= 6)
    return "***" if strong or looks or (len(value) >= 16 and " " not in value) else found[0]


def _plain(text: str) -> str:
    """The text without what is a secret wherever it stands."""
    text = _OPTION.sub(r"\1***", text)
    text = _KNOWN.sub(lambda found: f"{found[found.lastindex] if found.lastindex else ''}***", text)
    return _RUN.sub(lambda found: "***" if _is_random(found[0]) else found[0], text)


def _is_random(run: str) -> bool:
    """Whether characters look drawn by lot, and not like words."""
    if re.fullmatch("[0-9a-f]{32,}", run):
        return True
    if not all(re.search(kind, run) for kind in ("[a-z]", "[A-Z]", "[0-9]")) or "/" in run[:1]:
        return False
    counts = Counter(run).values()
    bits = -sum(count / len(run) * math.log2(count / len(run)) for count in counts)
    return bits > min(4.2, 0.91 * math.log2(len(run)))
