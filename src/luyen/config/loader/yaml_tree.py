"""YAML as users of this field write it, with the line of every value and limits on its size.

Departures from PyYAML's defaults: `1e-6` is a number, `0.5_2`, `off` and `2026-02-30` are words (it
reads 0.52, false and a date, or crashes), and a key written twice is a problem instead of a silent
win for the second. A key of one's own over one that `<<` brought in is no such repetition.
"""

import re
from typing import Any, final

import yaml

from luyen.config.loader.tree import ConfigTree
from luyen.config.problem import Origin, Problem

# How much a YAML text may hold once its aliases are written out.
#
# An alias costs a few characters and stands for a whole block, so that a text of some hundred
# bytes can stand for billions of values. All is counted from the parser's events, before
# anything is made.

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (PyYAML leaves its events untyped.)


DEEPEST = 100
"""Levels of nesting that are read. The parser in C would run out of stack far beyond."""
MOST_VALUES = 100_000
"""Values, keys and blocks that are read, each as often as aliases repeat it."""
MOST_CHARACTERS = 8 * 2**20
"""Characters of all of them together."""
_WIDEST = 64
"""Bits of a whole number."""
_LONGEST = 100
"""Characters in which one may be written, in any base."""


@final
class BeyondLimits(yaml.MarkedYAMLError):
    """The text is YAML, and more than is read."""


@final
class _Sum:
    """What a text comes to, up to some event."""

    def __init__(self) -> None:
        self.values = self.characters = 0

    def add(self, values: int, characters: int, event: Any) -> None:
        """Count more; BeyondLimits where that is too much."""
        self.values += values
        self.characters += characters
        if self.values > MOST_VALUES:
            raise _error(f"it holds more than {MOST_VALUES:,} values, aliases written out", event)
        if self.characters > MOST_CHARACTERS:
            why = f"it holds more than {MOST_CHARACTERS:,} characters, aliases written out"
            raise _error(why, event)


@final
class _Block:
    """A block: where the sum stood when it began, later what it comes to, and how deep it is."""

    def __init__(self, anchor: str | None, values: int, characters: int, height: int = 0) -> None:
        self.anchor = anchor
        self.values = values
        self.characters = characters
        self.height = height


def require_bounded(text: str, loader: Any) -> None:
    """Raise BeyondLimits, with its line, where the text passes one of the limits."""
    total = _Sum()
    known: dict[str, _Block] = {}
    blocks: list[_Block] = []
    for event in yaml.parse(text, Loader=loader):
        match event:
            case yaml.CollectionStartEvent():
                blocks.append(_Block(event.anchor, total.values, total.characters))
                total.add(1, 0, event)
                _require_depth(len(blocks), event)
            case yaml.CollectionEndEvent():
                block = blocks.pop()
                block.values = total.values - block.values
                block.characters = total.characters - block.characters
                _close(blocks, block, known)
            case yaml.ScalarEvent():
                total.add(1, len(event.value), event)
                _close(blocks, _Block(event.anchor, 1, len(event.value), -1), known)
            case yaml.AliasEvent():
                if any(block.anchor == event.anchor for block in blocks):
                    raise _error("an alias is inside the block that it names", event)
                if event.anchor in known:  # what has no anchor, the composer reports
                    named = known[event.anchor]
                    total.add(named.values, named.characters, event)
                    _require_depth(len(blocks) + named.height + 1, event)
                    _close(blocks, named, {})
            case _:
                pass


def _close(blocks: list[_Block], inner: _Block, known: dict[str, _Block]) -> None:
    if blocks:
        blocks[-1].height = max(blocks[-1].height, inner.height + 1)
    if inner.anchor is not None:
        known[inner.anchor] = inner


def _require_depth(depth: int, event: Any) -> None:
    if depth > DEEPEST:
        raise _error(f"nested more than {DEEPEST} levels deep", event)


def whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    """The number that a node says; BeyondLimits where no field could hold it."""
    text = str(loader.construct_scalar(node))
    value = loader.construct_yaml_int(node) if len(text) <= _LONGEST else 1 << _WIDEST
    if value.bit_length() > _WIDEST:
        raise _error(f"a whole number of more than {_WIDEST} bits", node)
    return value


def _error(why: str, at: Any) -> BeyondLimits:
    return BeyondLimits(problem=why, problem_mark=at.start_mark)


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (PyYAML leaves its constructors untyped.)


class _Loader(yaml.CSafeLoader):
    """PyYAML's safe loader with numbers and booleans as YAML 1.2 has them."""


_SCALARS = {
    "bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"[-+]?(0|[1-9]\d*)$", "-+0123456789"),
    "float": (
        r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        "-+0123456789.",
    ),
}

_RESOLVED_OTHERWISE = {*_SCALARS, "timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] not in _RESOLVED_OTHERWISE]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", whole_number)


def read_tree(text: str, source: str) -> ConfigTree:
    """Parse one YAML document; a problem is reported, not raised."""
    try:
        require_bounded(text, _Loader)
        return _parsed(text, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        if isinstance(error, BeyondLimits):
            return _broken(source, line, str(error.problem), "write less, or with fewer aliases")
        return _broken(source, line, f"not valid YAML: {error.problem}", "correct the syntax")
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # a character that YAML does not allow
        why = f"not valid YAML: {str(error).splitlines()[0]}"
        return _broken(source, 1, why, "save the file as plain UTF-8 text")


def read_items(text: str, source: str, name: str) -> list[ConfigTree]:
    """The blocks of a list at a key of the top, each as a tree of its own; the text must be sound.

    Entries that are not blocks are left out: `read_tree` has their value.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        assert isinstance(root, yaml.MappingNode), "the text holds no keys"
        listed = next(value for key, value in root.value if key.value == name)
        return [_tree(loader, node, source) for node in listed.value if _is_block(node)]
    finally:
        loader.dispose()


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def _tree(loader: _Loader, node: yaml.MappingNode, source: str) -> ConfigTree:
    origins: dict[str, Origin] = {}
    problems: list[Problem] = []
    values = _mapping(loader, node, source, "", origins, problems)
    return ConfigTree(values=values, origins=origins, problems=tuple(problems))


def _parsed(text: str, source: str) -> ConfigTree:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return ConfigTree(values={}, origins={})
        if not isinstance(root, yaml.MappingNode):
            return _broken(source, 1, "the file must hold keys and values", "start with `data:`")
        return _tree(loader, root, source)
    finally:
        loader.dispose()


def _mapping(
    loader: _Loader,
    node: yaml.MappingNode,
    source: str,
    path: str,
    origins: dict[str, Origin],
    problems: list[Problem],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    twice, node.value = _flat(loader, node)
    for key_node, value_node in node.value:
        name = str(_construct(loader, key_node))
        below = f"{path}.{name}" if path else name
        origin = Origin(source=source, line=key_node.start_mark.line + 1)
        if not name or "." in name:
            problems.append(_odd_key(below, name, origin))
            continue
        if name in twice:
            problems.append(_repeated(below, name, twice[name], origin))
        origins[below] = origin
        if isinstance(value_node, yaml.MappingNode):
            found[name] = _mapping(loader, value_node, source, below, origins, problems)
        else:
            found[name] = _construct(loader, value_node)
    return found


_Entries = list[tuple[yaml.Node, yaml.Node]]


def _flat(loader: _Loader, node: yaml.MappingNode) -> tuple[dict[str, int], _Entries]:
    """The first line of each key that is written twice, and one entry for each key, the last.

    Keys that `<<` brings in come first, so that a block's own keys win over them.
    """
    own = {id(key_node) for key_node, _ in node.value}
    loader.flatten_mapping(node)
    twice: dict[str, int] = {}
    written: dict[str, int] = {}
    entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key_node, value_node in node.value:
        name = str(_construct(loader, key_node))
        if id(key_node) in own:
            if name in written:
                twice[name] = written[name]
            written[name] = key_node.start_mark.line + 1
        entries[name] = (key_node, value_node)
    return twice, list(entries.values())


def _construct(loader: _Loader, node: yaml.Node) -> Any:
    """The value of a node; a tag that does not fit its text is a YAML error like any other."""
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        why = f"the value does not fit its tag {node.tag!r}"
        raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark) from error


def _repeated(path: str, name: str, first: int, origin: Origin) -> Problem:
    return Problem(
        id="C002",
        severity="error",
        field=path,
        value=name,
        why=f"the key is written twice, first at {origin.source}:{first}",
        fix="keep one of the two",
        origin=origin,
    )


def _odd_key(path: str, name: str, origin: Origin) -> Problem:
    """A key with a dot, which names no block in YAML, or without a name."""
    fix = "write each block on a line of its own, its keys below" if name else "name the key"
    return Problem(
        id="C005",
        severity="error",
        field=path,
        value=name,
        why="a key in a file holds no dot" if name else "a key without a name",
        fix=fix,
        origin=origin,
    )


def _broken(source: str, line: int, why: str, fix: str) -> ConfigTree:
    problem = Problem(
        id="C001",
        severity="error",
        field=source,
        value=None,
        why=why,
        fix=fix,
        origin=Origin(source=source, line=line),
    )
    return ConfigTree(values={}, origins={}, problems=(problem,))
