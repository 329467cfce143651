"""YAML as users of this field write it, with the line of every value.

Departures from PyYAML's defaults: `1e-6` is a number, `0.5_2` and `off` are words (it reads 0.52
and false), and a key written twice is a problem instead of a silent win for the second.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (PyYAML leaves its constructors untyped.)

import re
from typing import Any

import yaml

from luyen.config.problem import Origin, Problem
from luyen.config.tree import Tree


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

_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.rpartition(":")[2] not in _SCALARS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))


def read_tree(text: str, source: str) -> Tree:
    """Parse one YAML document; a problem is reported, not raised."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Tree(values={}, origins={})
        if not isinstance(root, yaml.MappingNode):
            return _broken(source, 1, "the file must hold keys and values", "start with `data:`")
        origins: dict[str, Origin] = {}
        problems: list[Problem] = []
        values = _mapping(loader, root, source, "", origins, problems)
        return Tree(values=values, origins=origins, problems=tuple(problems))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        return _broken(source, line, f"not valid YAML: {error.problem}", "mend the syntax")
    finally:
        loader.dispose()


def read_value(text: str) -> Any:
    """One YAML value, as on the right of `key=value`."""
    return yaml.load(text, _Loader)


def _mapping(
    loader: _Loader,
    node: yaml.MappingNode,
    source: str,
    path: str,
    origins: dict[str, Origin],
    problems: list[Problem],
) -> dict[str, Any]:
    loader.flatten_mapping(node)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = str(loader.construct_object(key_node, deep=True))
        below = f"{path}.{name}" if path else name
        origin = Origin(source=source, line=key_node.start_mark.line + 1)
        if name in found:
            problems.append(
                Problem(
                    id="C002",
                    severity="error",
                    field=below,
                    value=name,
                    why=f"the key is written twice, first at {origins[below]}",
                    fix="keep one of the two",
                    origin=origin,
                )
            )
        origins[below] = origin
        if isinstance(value_node, yaml.MappingNode):
            found[name] = _mapping(loader, value_node, source, below, origins, problems)
        else:
            found[name] = loader.construct_object(value_node, deep=True)
    return found


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
