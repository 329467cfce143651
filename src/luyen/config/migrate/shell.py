"""Words of the training command in a shell script, with the variables that the script assigns.

Nothing is executed. What only a shell could know (arguments, other variables, output of commands)
stays open, and `open_names` says what it was.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import final

from luyen.base.errors import UserError

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around the name of what could not be resolved."""
_UNRESOLVED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_CONDITION = re.compile(r"""^\[\[?\s+"?([^"\s]*)"?\s+(==?|!=)\s+["']?([^"'\s]*)["']?\s+\]\]?$""")
_VARIABLE = re.compile(
    r"\$(?:\{([A-Za-z_]\w*)\[@\]\}|\{([A-Za-z_]\w*)(?:(:?[-=])(.*))?\}|([A-Za-z_]\w*)|([@*#?\d]))"
)
_DOCUMENT = re.compile(r"""<<-?\s*["']?([A-Za-z_]\w*)["']?""")
_OF_PATH = re.compile(r"\$\(\s*(realpath|readlink -f|basename|dirname)\s+([^()|;&]+?)\s*\)")
_PATHS: dict[str, Callable[[str], str]] = {
    "realpath": str,
    "readlink -f": str,
    "basename": lambda path: PurePosixPath(path).name,
    "dirname": lambda path: str(PurePosixPath(path).parent),
}
"""Commands that give a path or a part of one; a path is the same file from the same folder."""
_MOST_QUOTED_LINES = 200
"""Lines of the longest text in quotes: a longer one is an apostrophe in what is no code."""
_HOME, _HERE = "~", "."
_MOST_DEPTH = 20
_MOST_CHARACTERS = 200_000
"""Length of the longest script, and of the longest value of a variable."""


def open_names(text: str) -> list[str]:
    """Names in a word that nothing in the script gives a value.

    Example:
        >>> open_names(command_words("python -m verl.trainer.main_ppo trainer.nnodes=$N")[-1])
        ['$N']
    """
    return _UNRESOLVED.findall(text)


def shown(text: str) -> str:
    """A word for people: open names as they were written."""
    return _UNRESOLVED.sub(lambda found: found[1], text)


def command_words(text: str, *, is_command: Callable[[list[str]], bool] | None = None) -> list[str]:
    """The words of the last command that trains; a UserError where there is none."""
    return training_commands(text, is_command=is_command)[-1]


def training_commands(
    text: str, *, is_command: Callable[[list[str]], bool] | None = None
) -> list[list[str]]:
    """The words of every command that trains; a UserError where there is none.

    Example:
        >>> [words] = training_commands("n=8\\npython3 -m verl.trainer.main_ppo a.b=$((n * 2)) $@")
        >>> words[-1]
        'a.b=16'
    """
    _require_short("script", text)
    found = [words for words in _Script().commands(text) if (is_command or trains)(words)]
    if not found:
        why = "it holds no training command of verl, TRL, LLaMA-Factory or Axolotl"
        raise UserError("script", text.strip()[:60], why, "give the script that starts training")
    return found


def _require_short(field: str, text: str) -> None:
    if len(text) > _MOST_CHARACTERS:
        why = f"it has more than {_MOST_CHARACTERS:,} characters"
        raise UserError(field, text[:60], why, "give the training command alone")


def trains(words: list[str]) -> bool:
    """Whether a command starts one of the four tools."""
    text = " ".join(words)
    module = r"(-m \S*|\S*/)(main_ppo|main_dapo|sft_trainer|fsdp_sft_trainer|main_\w*ppo)\b"
    is_module = re.search(module, text) is not None
    is_tool = re.search(r"\b(trl (sft|dpo|grpo|kto|reward|rloo|orpo|cpo)|llamafactory-cli)\b", text)
    is_axolotl = re.search(r"\baxolotl(\.cli)?[ .]train\b", text) is not None
    return is_module or is_tool is not None or is_axolotl or is_script(words)


def is_script(words: list[str]) -> bool:
    """Whether it starts a script of TRL with its keys as options."""
    named = [
        word for word in words if re.search(r"\b(sft|dpo|grpo|kto|reward\w*|orpo)\w*\.py$", word)
    ]
    return bool(named) and any(word.startswith("--") for word in words)


def overrides(words: Sequence[str], module: str) -> list[str]:
    """Hydra's overrides: keys, after the module also groups (`a=b`) and deletions (`~a.b`)."""
    start = words.index(module) if module in words else len(words)
    dotted = [word for word in words[:start] if "." in word.partition("=")[0]]
    after = words[start + 1 :]
    is_deletion = re.compile(r"~[\w.]+").fullmatch
    return [
        word
        for word in (*dotted, *after)
        if not word.startswith("-") and ("=" in word or is_deletion(word))
    ]


def flags(words: Sequence[str]) -> dict[str, str]:
    """Options that begin with `--`, and their values.

    Example:
        >>> flags(["torchrun", "--nnodes", "2", "--nproc_per_node=8"])
        {'nnodes': '2', 'nproc_per_node': '8'}
    """
    pairs = [word.lstrip("-").partition("=") for word in words if word.startswith("--")]
    after = dict(pairwise(words))
    return {name: value or after.get(f"--{name}", "") for name, _, value in pairs}


@final
class _Script:
    """Reads a script from top to bottom; holds the variables that were assigned so far."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {"HOME": _HOME, "PWD": _HERE}
        self._arrays: dict[str, list[str]] = {}
        self._branches: list[bool | None] = []
        """For each `if` around the line: whether it is taken; None where that is not known."""

    def commands(self, text: str) -> Iterator[list[str]]:
        """The words of every command, in order; assignments are carried out."""
        for line in _logical_lines(text):
            if self._is_flow(line) or False in self._branches:
                continue
            found = _ASSIGNMENT.fullmatch(line)
            if found is not None and found[2].startswith("("):
                self._arrays[found[1]] = self.words(found[2].strip()[1:].removesuffix(")"))
            elif found is not None and len(self.words(found[2], splits=False)) <= 1:
                value = "".join(self.words(found[2], splits=False))
                _require_short(found[1], value)
                self._variables[found[1]] = value
            else:
                yield self.words(line)

    def _is_flow(self, line: str) -> bool:
        """Whether a line belongs to an `if`; keeps track of the branch that is taken."""
        word = line.split(maxsplit=1)[0]
        if word in ("if", "elif"):
            condition = line.removeprefix(word).strip().removesuffix("then").rstrip("; ").strip()
            taken = self._holds(condition)
            if word == "elif" and self._branches:
                before = self._branches.pop()
                taken = False if before else taken
            self._branches.append(taken)
            return True
        if word == "else" and self._branches:
            before = self._branches.pop()
            self._branches.append(None if before is None else not before)
        if word == "fi" and self._branches:
            self._branches.pop()
        return word in ("else", "fi", "then", "#!/bin/bash")

    def _holds(self, condition: str) -> bool | None:
        """Whether `[ a = b ]` holds; None where it is another condition, or open."""
        found = _CONDITION.match(condition)
        if found is None:
            return None
        left, right = ("".join(self.words(part)) for part in (found[1], found[3]))
        if open_names(left + right):
            return None
        return (left == right) is (found[2] != "!=")

    def words(self, text: str, *, splits: bool = True) -> list[str]:
        """A command split at blanks, with quotes removed and variables replaced.

        `splits`: also at blanks of variables that stand outside of quotes.
        """
        words: list[str] = []
        word, is_open, i = "", False, 0
        while i < len(text):
            char = text[i]
            if char.isspace():
                words, word, is_open, i = [*words, *([word] if is_open else [])], "", False, i + 1
            elif char == "#" and not is_open:
                break
            elif char == "'":
                end = text.find("'", i + 1)
                end = len(text) if end < 0 else end
                word, is_open, i = word + text[i + 1 : end], True, end + 1
            elif char == '"':
                inner, i = _quoted(text, i + 1)
                listed = _VARIABLE.fullmatch(inner)
                if listed is not None and listed[1]:
                    words += self._arrays.get(listed[1], [f"{_OPEN}{inner}{_CLOSE}"])
                else:
                    word, is_open = word + self.expanded(inner), True
            elif char == "\\" and i + 1 < len(text):
                word, is_open, i = word + text[i + 1], True, i + 2
            elif char == "$":
                raw, i = _reference(text, i)
                if raw not in ("$@", "$*", "${@}"):
                    value = self.expanded(raw)
                    before, *more = _split(value) if splits else [value]
                    word, is_open = word + before, is_open or bool(before)
                    for part in more:
                        words, word = [*words, *([word] if is_open else [])], part
                        is_open = bool(part)
            else:
                word, is_open, i = word + char, True, i + 1
        return [*words, *([word] if is_open else [])]

    def expanded(self, text: str, depth: int = 0) -> str:
        """The text with what the script knows; the rest is marked as open."""
        found, i = "", 0
        while i < len(text):
            if text[i] != "$" or depth > _MOST_DEPTH:
                found, i = found + text[i], i + 1
                continue
            raw, i = _reference(text, i)
            found += self._value(raw, depth)
        return found

    def _value(self, raw: str, depth: int) -> str:
        if raw.startswith("$(("):
            number = _calculated(self.expanded(raw[3:-2], depth + 1), self._variables)
            return f"{_OPEN}{raw}{_CLOSE}" if number is None else number
        if raw.replace(" ", "") == "$(pwd)":
            return _HERE
        of_path = _OF_PATH.fullmatch(raw)
        if of_path is not None:
            path = "".join(self.words(of_path[2], splits=False))
            return f"{_OPEN}{raw}{_CLOSE}" if open_names(path) else _PATHS[of_path[1]](path)
        found = _VARIABLE.fullmatch(raw)
        name = (found[2] or found[5]) if found is not None else None
        if found is None or name is None:
            return f"{_OPEN}{raw}{_CLOSE}" if raw not in ("$", "$@", "$*") else ""
        if name in self._variables and (self._variables[name] or not found[3]):
            return self._variables[name]
        if found[3]:
            return self.expanded(found[4].strip("\"'"), depth + 1)
        return f"{_OPEN}${name}{_CLOSE}"


def _split(value: str) -> list[str]:
    """The parts of a value between its blanks; an empty one where a blank begins or ends it.

    Example:
        >>> _split("a=1 b=2 "), _split("8"), _split("")
        (['a=1', 'b=2', ''], ['8'], [''])
    """
    return re.split(rf"\s+(?![^{_OPEN}]*{_CLOSE})", value)


def _logical_lines(text: str) -> Iterator[str]:
    """Commands one by one, without comments; continued lines, quotes and arrays are one."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(kept).replace("\\\n", "")
    lines = iter(_quotes_closed(_without_documents(joined.split("\n"))))
    for line in lines:
        whole = line.strip()
        if re.match(r"(export\s+)?[A-Za-z_]\w*=\($", whole.split("#")[0].strip()):
            for more in lines:
                whole = f"{whole} {' '.join(_statements(more))}"
                if more.strip() == ")":
                    break
        for statement in _statements(whole):
            word, blank, rest = statement.partition(" ")
            if blank and word in ("then", "else", "do"):
                yield from (word, rest.strip())
            else:
                yield statement


def _without_documents(lines: Sequence[str]) -> list[str]:
    """The lines without those of documents (`<<EOF`), which are no commands."""
    found: list[str] = []
    end: str | None = None
    for line in lines:
        if end is not None:
            end = None if line.strip() == end else end
            continue
        found.append(line)
        document = _DOCUMENT.search(line)
        end = document[1] if document is not None else None
    return found if end is None else list(lines)


def _quotes_closed(lines: Sequence[str]) -> Iterator[str]:
    """The lines, with those that a quote goes over as one; a quote that never ends is a sign."""
    quoted: list[str] = []
    for line in lines:
        quoted.append(line)
        if len(quoted) > _MOST_QUOTED_LINES:
            yield from quoted
            quoted = []
        elif not _is_in_quotes("\n".join(quoted)):
            yield "\n".join(quoted)
            quoted = []
    yield from quoted


def _is_in_quotes(line: str) -> bool:
    """Whether a quote begins in the line and does not end there."""
    i = 0
    while i < len(line):
        char, before = line[i], line[i - 1 : i]
        if char == "#" and (not before or before.isspace()):
            i = line.find("\n", i)
            if i < 0:
                return False
        elif char == "\\":
            i += 2
        elif char == "'":
            i = line.find("'", i + 1) + 1
            if i == 0:
                return True
        elif char == '"':
            _, i = _quoted(line, i + 1)
            if i > len(line):
                return True
        else:
            i += 1
    return False


def _statements(line: str) -> Iterator[str]:
    """The commands of a line, which `;`, `|` and `&` outside of quotes separate."""
    start = i = 0
    while i < len(line):
        char, before = line[i], line[i - 1 : i]
        if char == "\\":
            i += 2
        elif char == "'":
            end = line.find("'", i + 1)
            i = len(line) if end < 0 else end + 1
        elif char == '"':
            _, i = _quoted(line, i + 1)
        elif char == "$":
            _, i = _reference(line, i)
        elif char == "#" and (not before or before.isspace()):
            break
        elif char in ";|&" and before not in ("<", ">") and line[i : i + 2] != "&>":
            if line[start:i].strip():
                yield line[start:i].strip()
            start = i = i + 1
        else:
            i += 1
    if line[start:i].strip():
        yield line[start:i].strip()


def _quoted(text: str, start: int) -> tuple[str, int]:
    """What stands between double quotes, and where the rest begins."""
    end, depth = start, 0
    while end < len(text) and (text[end] != '"' or depth > 0):
        char, is_inside = text[end], depth > 0
        is_opening = char in "{(" and (text[end - 1] == "$" or (is_inside and char == "("))
        depth += is_opening - (char in "})" and is_inside)
        end += 2 if text[end] == "\\" else 1
    return text[start:end].replace('\\"', '"'), end + 1


def _reference(text: str, start: int) -> tuple[str, int]:
    """A variable, an arithmetic expression or a command, and where the rest begins."""
    for opening, closing in (("$((", "))"), ("$(", ")"), ("${", "}")):
        if text.startswith(opening, start):
            depth, end = 0, start + 1
            while end < len(text):
                depth += (text[end] in "({") - (text[end] in ")}")
                end += 1
                if depth == 0:
                    break
            if closing == "))" and not text[start:end].endswith("))"):
                return text[start:end], end
            return text[start:end], end
    found = _VARIABLE.match(text, start)
    return (found[0], found.end()) if found is not None else ("$", start + 1)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}


def _calculated(text: str, variables: Mapping[str, str]) -> str | None:
    """The value of an arithmetic expression; None where a part of it is open."""
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr, variables: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name) if variables.get(name, "").lstrip("-").isdigit():
            return int(variables[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _number(left, variables), _number(right, variables)
            if max(abs(a), abs(b)) > 10**12:
                raise ValueError("no size of a run is that large")
            return _OPERATORS[type(op)](a, b)
        case _:
            raise ValueError("the script does not give its value")
