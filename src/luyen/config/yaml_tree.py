"""YAML as users of this field write it, with the line of every value.

Departures from PyYAML's defaults: `1e-6` is a number, `0.5_2`, `off` and `2026-02-30` are words (it
reads 0.52, false and a date, or crashes), and a key written twice is a problem instead of a silent
win for the second. A key of one's own over one that `<<` brought in is no such repetition.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (PyYAML leaves its constructors untyped.)

import re
from typing import Any

import yaml

from luyen.config.problem import Origin, Problem
from luyen.config.tree import Tree
from luyen.config.yaml_limits import BeyondLimits, require_bounded, whole_number


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


def read_tree(text: str, source: str) -> Tree:
    """Parse one YAML document; a problem is reported, not raised."""
    try:
        require_bounded(text, _Loader)
        return _parsed(text, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        if isinstance(error, BeyondLimits):
            return _broken(source, line, str(error.problem), "write less, or with fewer aliases")
        return _broken(source, line, f"not valid YAML: {error.problem}", "mend the syntax")
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # a character that YAML does not allow
        why = f"not valid YAML: {str(error).splitlines()[0]}"
        return _broken(source, 1, why, "save the file as plain UTF-8 text")


def read_items(text: str, source: str, name: str) -> list[Tree]:
    """The blocks of a list at a key of the top, each as a tree of its own; the text must be sound.

    What stands in the list and is no block is left out: `read_tree` has its value.
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


def _tree(loader: _Loader, node: yaml.MappingNode, source: str) -> Tree:
    origins: dict[str, Origin] = {}
    problems: list[Problem] = []
    values = _mapping(loader, node, source, "", origins, problems)
    return Tree(values=values, origins=origins, problems=tuple(problems))


def _parsed(text: str, source: str) -> Tree:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Tree(values={}, origins={})
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


def _broken(source: str, line: int, why: str, fix: str) -> Tree:
    problem = Problem(
        id="C001",
        severity="error",
        field=source,
        value=None,
        why=why,
        fix=fix,
        origin=Origin(source=source, line=line),
    )
    return Tree(values={}, origins={}, problems=(problem,))
