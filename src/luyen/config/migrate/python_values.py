"""Plain values of a Python file by its syntax tree: what names, tables and options stand for.

Nothing is executed. Known are names that are assigned one value, entries of tables, fields of
classes and of their instances, defaults of options of `argparse` and of environment variables.
Everything else is open: text that begins with `OPEN`, with the code that computes it.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast, final

from luyen.base.errors import UserError

OPEN = "what the script computes: "
"""How a value begins that the syntax tree does not give."""
_MOST_CHARACTERS, _MOST_PARTS, _LARGEST = 10_000, 10_000, 1e15
"""Longest text, most entries of a table and largest number that are computed."""
_ROUNDS = 3
"""How often names are read: a name may be known only after one that stands below it."""
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "str": str,
    # A path stands for its text.
    "Path": lambda value: str(PurePosixPath(str(value))),
}
_JOINS = ("os.path.join", "path.join", "osp.join")
_PARSES = ("parse_args", "parse_known_args")
"""Methods of a parser of options that give all of them."""


@final
class Fields(dict[str, Any]):
    """Fields of a class or of an object, by name: `config.rate` is an entry of it.

    Example:
        >>> Fields(rate=0.1)["rate"]
        0.1
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Function:
    """A function of the file that is one expression of its arguments.

    Example:
        >>> [node] = ast.parse("def doubled(n):\\n    return 2 * n").body
        >>> _Function(arguments=node.args, result=node.body[0].value).arguments.args[0].arg
        'n'
    """

    arguments: ast.arguments
    """Its arguments, with their defaults."""
    result: ast.expr
    """What it returns."""


def parsed(text: str, file: str) -> ast.Module:
    """The syntax tree of a file; a UserError where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError("source", file, f"no Python: {error}", "give a file that runs") from error


def is_open(value: Any) -> bool:
    """Whether the script computes a value, or an entry of a list.

    Example:
        >>> is_open(1), is_open([1, OPEN + "f()"])
        (False, True)
    """
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    return any(isinstance(one, str) and one.startswith(OPEN) for one in listed)


def constants(tree: ast.Module) -> dict[str, Any]:
    """Names that stand for one plain value, anywhere in the file."""
    options = _options(tree)
    changed, parts = _changed(tree)
    known: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        known = _once(tree, known, options)
        known = {name: value for name, value in known.items() if name not in changed}
        for name, keys in parts.items():
            if isinstance(known.get(name), dict):
                known[name] |= {key: f"{OPEN}{name}.{key}" for key in keys}
    return known


def _once(tree: ast.Module, before: Mapping[str, Any], options: Fields) -> dict[str, Any]:
    """Names that are assigned one value, added to what was known of names before."""
    known: dict[str, Any] = {}
    twice: set[str] = set()
    for name, value in _assigned(tree, before, options):
        if name in known and known[name] != value:
            twice.add(name)
        known[name] = value
    kept = {name: v for name, v in known.items() if name not in twice and not is_open(v)}
    return {**_arguments(tree, kept), **kept}


def _assigned(
    tree: ast.Module, known: Mapping[str, Any], options: Fields
) -> Iterator[tuple[str, Any]]:
    """Every assignment to a name, with its value; classes with their fields."""
    parsers = _parsers(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name, body=body):
                yield name, _fields(body, known)
            case ast.FunctionDef(name=name, args=arguments, body=[*about, ast.Return() as end]) if (
                end.value is not None and all(map(_is_text, about)) and not _is_of_any(arguments)
            ):
                yield name, _Function(arguments=arguments, result=end.value)
            case ast.Assign(targets=[target], value=value) if options and _parses(value, parsers):
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                if isinstance(first, ast.Name):
                    yield first.id, options
            case ast.Call(func=ast.Name(id=called), args=[value]) if options and _parses(
                value, parsers
            ):
                yield from ((name, options) for name in _only_argument(tree, called))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value_of(value, known)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
                names
            ) == len(values):
                for one, value in zip(names, values, strict=True):
                    if isinstance(one, ast.Name):
                        yield one.id, value_of(value, known)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value_of(value, known)
            case _:
                continue


def _parsers(tree: ast.Module) -> set[str]:
    """Functions of the file that end with all options: `return parser.parse_args()`."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and isinstance(end := node.body[-1], ast.Return)
        and end.value is not None
        and _parses(end.value, ())
    }


def _parses(node: ast.expr, parsers: Container[str]) -> bool:
    """Whether a call gives all options: of a parser, or of a function that ends with them."""
    if not isinstance(node, ast.Call):
        return False
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _PARSES
    return is_method or (isinstance(node.func, ast.Name) and node.func.id in parsers)


def _only_argument(tree: ast.Module, name: str) -> list[str]:
    """The argument of a function of the file that has one alone: `main(parse_args())`."""
    return [
        node.args.args[0].arg
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name and len(node.args.args) == 1
    ]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_of_any(arguments: ast.arguments) -> bool:
    """Whether a function takes any arguments, or is a method, which its object changes."""
    first = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][:1]
    is_method = first in (["self"], ["cls"])
    return is_method or arguments.vararg is not None or arguments.kwarg is not None


def _fields(body: Sequence[ast.stmt], known: Mapping[str, Any]) -> Fields:
    """Fields of a class with their defaults; `field(default=...)` of a dataclass too."""
    found = Fields()
    for node in body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                if isinstance(value, ast.Call) and _name(value.func) == "field":
                    given = {word.arg: word.value for word in value.keywords}
                    value = given.get("default", value)
                found[name] = value_of(value, known)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = f"{OPEN}{name}"
            case _:
                continue
    return found


def _arguments(tree: ast.Module, known: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of functions that are objects of a class which the file makes in one way alone."""
    made: dict[str, list[Any]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(known.get(_name(node.func)), Fields):
            made[_name(node.func)].append(value_of(node, known))
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.arg) or not isinstance(node.annotation, ast.Name):
            continue
        name = node.annotation.id
        objects = made[name] or [known.get(name)]
        is_one = isinstance(objects[0], Fields) and all(one == objects[0] for one in objects)
        found[node.arg] = objects[0] if is_one and found.get(node.arg, objects[0]) else None
    return {name: value for name, value in found.items() if value is not None}


def _options(tree: ast.Module) -> Fields:
    """Defaults of the options of `argparse`."""
    found = Fields()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _name(node.func) != "add_argument":
            continue
        words = {word.arg: value_of(word.value, {}) for word in node.keywords}
        flags = [value_of(flag, {}) for flag in node.args]
        named = words.get("dest") or next((f for f in flags if str(f).startswith("--")), None)
        if not isinstance(named, str) or is_open(named):
            continue
        name = named.removeprefix("--").replace("-", "_")
        switch = {"store_true": False, "store_false": True}.get(str(words.get("action")))
        if "default" in words or switch is not None:
            found[name] = words.get("default", switch)
    return found


def _changed(tree: ast.Module) -> tuple[set[str], dict[str, set[str]]]:
    """Names that are changed after they were assigned, and names of which entries are."""
    whole: set[str] = set()
    parts: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=ast.Name(id=name)) | ast.NamedExpr(target=ast.Name(id=name)):
                whole.add(name)
            case ast.For(target=target) | ast.comprehension(target=target):
                whole |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
            case ast.Attribute(value=ast.Name(id=name), attr=key, ctx=ast.Store()):
                parts[name].add(key)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if (
                isinstance(node.ctx, ast.Store)
            ):
                parts[name].add(key)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                whole.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)) if called in (
                "update",
                "setdefault",
                "pop",
                "append",
                "extend",
                "clear",
            ):
                whole.add(name)
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]):
                whole.add(name)
            case _:
                continue
    return whole, parts


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def value_of(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """A plain value, or the text of what computes it."""
    found = _value(node, known)
    return _unknown(node) if _size(found) > _MOST_PARTS else found


def _unknown(node: ast.expr) -> str:
    return f"{OPEN}{ast.unparse(node)}"


def _size(value: Any) -> int:
    """Entries of a value, those of its parts too, each of which is of a bounded size."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, cast(dict[str, Any], value).values()))
    return 1 + sum(map(_size, cast(list[Any], value))) if isinstance(value, list) else 1


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in known and not isinstance(known[name], _Function):
            return known[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            found = [value_of(part, known) for part in parts]
            return _unknown(node) if is_open(found) else found
        case ast.Dict(keys=keys, values=values) if all(keys):
            names = [value_of(cast(ast.expr, key), known) for key in keys]
            return {str(k): value_of(v, known) for k, v in zip(names, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = value_of(operand, known)
            return -inner if isinstance(inner, int | float) else _unknown(node)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = value_of(operand, known)
            return _unknown(node) if is_open(inner) else not inner
        case ast.BinOp(left=left, op=op, right=right):
            return _calculated(node, value_of(left, known), op, value_of(right, known))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            answer = value_of(test, known)
            chosen = body if answer else otherwise
            return _unknown(node) if is_open(answer) else value_of(chosen, known)
        case ast.JoinedStr(values=parts):
            inner = [_formatted(part, known) for part in parts]
            text = "".join(map(str, inner))
            is_long = len(text) > _MOST_CHARACTERS
            return _unknown(node) if is_open(inner) or is_long else text
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name
        case ast.Attribute() | ast.Subscript():
            return _part(node, known)
        case ast.Call():
            return _called(node, known)
        case _:
            return _unknown(node)


def _formatted(part: ast.expr, known: Mapping[str, Any]) -> Any:
    if not isinstance(part, ast.FormattedValue):
        return value_of(part, known)
    is_plain = part.conversion == -1 and part.format_spec is None
    return value_of(part.value, known) if is_plain else _unknown(part.value)


def _part(node: ast.Attribute | ast.Subscript, known: Mapping[str, Any]) -> Any:
    """A field of an object, or an entry of a table or of a list."""
    whole = value_of(node.value, known)
    if isinstance(node, ast.Attribute):
        fields = whole if isinstance(whole, Fields) else Fields()
        return fields.get(node.attr, _unknown(node))
    key = value_of(node.slice, known)
    if isinstance(whole, dict):
        return cast(dict[str, Any], whole).get(str(key), _unknown(node))
    listed = cast(list[Any], whole) if isinstance(whole, list) else []
    is_there = isinstance(key, int) and -len(listed) <= key < len(listed)
    return listed[key] if is_there else _unknown(node)


def _called(node: ast.Call, known: Mapping[str, Any]) -> Any:
    """An object of a class of the file, an entry with a default, or a conversion."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if isinstance(known.get(name), Fields):
            return _made(node, cast(Fields, known[name]), known)
        case ast.Call(func=ast.Name(id=name)) if isinstance(known.get(name), _Function):
            return _returned(node, cast(_Function, known[name]), known)
        case ast.Call(func=function, args=[_, *_]) if ast.unparse(function) in _JOINS:
            parts = [value_of(part, known) for part in node.args]
            is_plain = all(isinstance(part, str) for part in parts) and not is_open(parts)
            joined = str(PurePosixPath(*parts)) if is_plain else ""
            return joined if 0 < len(joined) <= _MOST_CHARACTERS else _unknown(node)
        case ast.Call(func=ast.Name(id=name), args=[one]) if name in _CONVERSIONS:
            return _converted(node, name, value_of(one, known))
        case ast.Call(func=function, args=[_, otherwise]) if ast.unparse(function) in (
            *("os.environ.get", "os.getenv", "environ.get", "getenv"),
        ):
            return value_of(otherwise, known)
        case ast.Call(func=ast.Attribute(value=whole, attr="get"), args=[key, *otherwise]):
            table, name = value_of(whole, known), value_of(key, known)
            if not isinstance(table, dict) or is_open(name):
                return _unknown(node)
            default = value_of(otherwise[0], known) if otherwise else None
            return cast(dict[str, Any], table).get(str(name), default)
        case _:
            return _unknown(node)


def _made(node: ast.Call, fields: Fields, known: Mapping[str, Any]) -> Any:
    """An object of a class: its fields with what the call gives them."""
    if any(word.arg is None for word in node.keywords) or len(node.args) > len(fields):
        return _unknown(node)
    values = [value_of(one, known) for one in node.args]
    given = {cast(str, word.arg): value_of(word.value, known) for word in node.keywords}
    return Fields({**fields, **dict(zip(fields, values, strict=False)), **given})


def _returned(node: ast.Call, function: _Function, known: Mapping[str, Any]) -> Any:
    """What a function of the file returns; it may call no other one of the file."""
    named, defaults = function.arguments, function.arguments.defaults
    positional = [one.arg for one in (*named.posonlyargs, *named.args)]
    more = [one.arg for one in named.kwonlyargs]
    if len(node.args) > len(positional) or any(word.arg is None for word in node.keywords):
        return _unknown(node)
    plain = {name: value for name, value in known.items() if not isinstance(value, _Function)}
    given = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    given |= {n: v for n, v in zip(more, named.kw_defaults, strict=True) if v is not None}
    values = {name: value_of(value, plain) for name, value in given.items()}
    values |= {n: value_of(v, known) for n, v in zip(positional, node.args, strict=False)}
    values |= {cast(str, word.arg): value_of(word.value, known) for word in node.keywords}
    found = value_of(function.result, {**plain, **values})
    is_known = set(values) == {*positional, *more} and not is_open(found)
    return found if is_known else _unknown(node)


def _converted(node: ast.Call, name: str, value: Any) -> Any:
    if is_open(value) or not isinstance(value, str | int | float):
        return _unknown(node)
    try:
        return _CONVERSIONS[name](value)
    except (ValueError, OverflowError):
        return _unknown(node)


def _calculated(node: ast.BinOp, left: Any, op: ast.operator, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add):
        is_long = len(left) + len(right) > _MOST_CHARACTERS
        return _unknown(node) if is_long or is_open([left, right]) else left + right
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Div):
        # Only paths are divided by text.
        is_long = len(left) + len(right) > _MOST_CHARACTERS
        is_known = not is_long and not is_open([left, right])
        return str(PurePosixPath(left, right)) if is_known else _unknown(node)
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return _unknown(node)
    if max(abs(left), abs(right)) > _LARGEST:
        return _unknown(node)
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv() if right:
            return left // right
        case ast.Div() if right:
            return left / right
        case _:
            return _unknown(node)


def is_importable(tree: ast.Module) -> bool:
    """Whether importing a file only defines things: no training starts."""
    return all(_only_defines(node) for node in tree.body)


def _only_defines(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
            return True
        case ast.AsyncFunctionDef() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=value):
            return not is_open(value_of(value, {}))
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case _:
            return False


def defines(tree: ast.Module, names: Any) -> bool:
    """Whether a file defines functions of all these names."""
    here = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return all(str(name) in here for name in names)
