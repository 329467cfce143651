"""The definition of a class, and proof that the class is what it says.

A class is written if it consists of functions, properties, static and class methods and literals,
each as its file has it, and if nothing was added. `dataclass` is the only decorator that is known.
"""

import ast
import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, cast

from luyen.base.source_files import (
    NoSource,
    SourceFile,
    definition_of,
    have_same_code,
    source_file,
)

_OF_EVERY_CLASS = frozenset(
    f"__{name}__"
    for name in (
        *("module", "qualname", "doc", "dict", "weakref", "annotations", "firstlineno"),
        *("static_attributes", "annotate", "annotate_func", "annotations_cache"),
    )
)
_METHODS = {"property": property, "staticmethod": staticmethod, "classmethod": classmethod}
_MADE_BY_US = ("tool_class",)
"""Decorators of ours, which the file of the object has after the definitions."""
_CONSTANT = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.Load),
)


def class_definition(
    name: str, value: type, home: tuple[dict[str, Any], SourceFile] | None = None
) -> tuple[ast.ClassDef, dict[str, Any], SourceFile, list[CodeType]]:
    """The definition of a class, the names around it, its file and the code of its methods.

    `home` are the names and the file of what uses it, where a class without methods is looked for.
    NoSource for a class that was changed, or that has a part whose making is not known.
    """
    if type(value) is not type or "." in value.__qualname__:
        raise NoSource(f"`{name}` is no plain class of a module")
    known, file = _place_of(name, value, home)
    bound = file.bindings.get(value.__name__, [])
    if len(bound) != 1 or not isinstance(bound[0], ast.ClassDef):
        raise NoSource(f"the source of `{name}` is not known")
    node = copy.deepcopy(bound[0])
    fields = _dataclass_options(name, node, known)
    if node.keywords:
        raise NoSource(f"`{name}` has keywords in its definition")
    own = vars(value)
    expected: set[str] = set()
    codes: list[CodeType] = []
    for part in node.body:
        for member in _demand_part(name, node, part, own, known, codes, fields is not None):
            expected.add(member)
    made = {} if fields is None else _made_by_dataclass(value, node, fields)
    for member, one in made.items():
        if member not in expected and not _is_made_alike(own.get(member), one):
            raise NoSource(f"`{name}` has changed since it was defined: `{member}`")
    if more := {*own} - expected - {*made} - _OF_EVERY_CLASS:
        raise NoSource(f"`{name}` has changed since it was defined: `{min(more)}`")
    if not made and ast.get_docstring(node, clean=False) != own.get("__doc__"):
        raise NoSource(f"`{name}` has changed since it was defined: its documentation")
    _demand_bases(name, value, node, known)
    return node, known, file, codes


def _place_of(
    name: str, value: type, around: tuple[dict[str, Any], SourceFile] | None
) -> tuple[dict[str, Any], SourceFile]:
    """Names around a class, and its file: those of its first method, or of its module."""
    for part in vars(value).values():
        is_own = isinstance(part, FunctionType) and part.__code__.co_filename != "<string>"
        if is_own and part.__globals__.get("__name__") == value.__module__:
            return part.__globals__, source_file(part.__code__.co_filename)
    is_seen = around is not None and around[0].get("__name__") == value.__module__
    if around is not None and is_seen and around[0].get(value.__name__) is value:
        return around
    home = sys.modules.get(value.__module__)
    file = home.__file__ if home is not None and "__file__" in vars(home) else None
    if home is None or file is None or vars(home).get(value.__name__) is not value:
        raise NoSource(f"the source of `{name}` is not known")
    return vars(home), source_file(file)


def _demand_part(
    name: str,
    of: ast.ClassDef,
    part: ast.stmt,
    own: Mapping[str, Any],
    known: Mapping[str, Any],
    codes: list[CodeType],
    has_fields: bool,
) -> Iterator[str]:
    """Names that a statement of a class defines, each as it is now."""
    match part:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return
        case ast.FunctionDef(name=plain) | ast.AsyncFunctionDef(name=plain):
            member = _mangled(plain, of.name)
            codes.append(_demand_method(name, part, own.get(member), known))
        case ast.AnnAssign(target=ast.Name(id=plain), value=None):
            member = _mangled(plain, of.name)
            if member in own:
                raise _changed(name, plain)
        case ast.AnnAssign(target=ast.Name(id=plain), value=ast.expr() as given):
            member = _mangled(plain, of.name)
            if not (has_fields and _is_field(given, own, member, known)):
                _demand_literal(name, plain, given, own.get(member, part))
        case ast.Assign(targets=[ast.Name(id=plain)], value=given):
            member = _mangled(plain, of.name)
            _demand_literal(name, plain, given, own.get(member, part))
        case _:
            raise NoSource(f"`{name}` has a part of which it is not known what it makes")
    yield member


def _changed(name: str, member: str) -> NoSource:
    return NoSource(f"`{name}` has changed since it was defined: `{member}`")


def _mangled(name: str, of: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{of.lstrip('_')}{name}" if is_private else name


def _demand_method(
    name: str,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    value: Any,
    known: Mapping[str, Any],
) -> CodeType:
    """The code of a method, which is the one of this definition."""
    words = [one.id if isinstance(one, ast.Name) else "" for one in node.decorator_list]
    if len(words) > 1 or (words and (words[0] not in _METHODS or words[0] in known)):
        raise NoSource(f"`{name}.{node.name}` has a decorator that is not known")
    if words:
        if type(value) is not _METHODS[words[0]]:
            raise _changed(name, node.name)
        is_whole = not isinstance(value, property) or (value.fset is None and value.fdel is None)
        value = value.fget if isinstance(value, property) else cast(Any, value).__func__
        if not is_whole:
            raise _changed(name, node.name)
    if not isinstance(value, FunctionType) or vars(value) or value.__globals__ is not known:
        raise _changed(name, node.name)
    found = definition_of(value.__code__)
    is_placed = isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    if not is_placed or (found.name, found.lineno) != (node.name, node.lineno):
        raise _changed(name, node.name)
    if value.__name__ != node.name or (value.__doc__ or None) != _doc(node):
        raise _changed(name, node.name)
    _demand_defaults(name, node, value, known)
    return value.__code__


def _doc(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    return ast.get_docstring(node, clean=False) or None


def _demand_defaults(
    name: str,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    value: FunctionType,
    known: Mapping[str, Any],
) -> None:
    named = value.__kwdefaults__ or {}
    written = {
        one.arg: default
        for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is not None
    }
    own = value.__defaults__ or ()
    if len(own) != len(node.args.defaults) or {*named} != {*written}:
        raise _changed(name, node.name)
    pairs = [*zip(node.args.defaults, own, strict=True)]
    pairs += [(written[one], named[one]) for one in written]
    for expression, now in pairs:
        if isinstance(expression, ast.Name) and known.get(expression.id, expression) is now:
            continue
        _demand_literal(name, node.name, expression, now)


def _demand_literal(name: str, member: str, node: ast.expr, value: Any) -> None:
    """NoSource unless an expression of constants gives exactly this value."""
    if not all(isinstance(one, _CONSTANT) for one in ast.walk(node)):
        raise NoSource(f"`{name}.{member}` is no literal")
    try:
        code = compile(ast.Expression(body=node), "<source>", "eval")
        written = eval(code, {"__builtins__": {}})  # constants and arithmetic only
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NoSource(f"`{name}.{member}` is no literal") from error
    if type(written) is not type(value) or _exact(written) != _exact(value):
        raise _changed(name, member)


def _exact(value: Any) -> str:
    """A text that tells values of different types apart, also inside of collections."""
    if type(value) in (list, tuple, set, frozenset):
        return f"{type(value).__name__}({[_exact(one) for one in value]})"
    if type(value) is dict:
        pairs = cast(dict[Any, Any], value).items()
        return f"dict({[(_exact(key), _exact(one)) for key, one in pairs]})"
    return f"{type(value).__name__} {value!r}"


def _demand_bases(name: str, value: type, node: ast.ClassDef, known: Mapping[str, Any]) -> None:
    bases = [one for one in value.__bases__ if one is not object]
    if [one.id if isinstance(one, ast.Name) else "" for one in node.bases] == ["object"]:
        return
    if len(bases) != len(node.bases):
        raise NoSource(f"the bases of `{name}` are not those of its source")
    for one, base in zip(node.bases, bases, strict=True):
        found: Any = known.get(one.id) if isinstance(one, ast.Name) else None
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            module = known.get(one.value.id)
            found = vars(module).get(one.attr) if isinstance(module, ModuleType) else None
        is_builtin = isinstance(one, ast.Name) and one.id not in known
        if found is not base and not (is_builtin and base.__module__ == "builtins"):
            raise NoSource(f"the bases of `{name}` are not those of its source")


# Data classes.


def _dataclass_options(
    name: str, node: ast.ClassDef, known: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Keywords of the decorator `dataclass`; None without it. A decorator of ours is taken off."""
    found: dict[str, Any] | None = None
    for decorator in list(node.decorator_list):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        maker: Any = known.get(called.id) if isinstance(called, ast.Name) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            home = known.get(called.value.id)
            maker = vars(home).get(called.attr) if isinstance(home, ModuleType) else None
        if maker is dataclasses.dataclass and found is None:
            given = decorator.keywords if isinstance(decorator, ast.Call) else []
            if not all(one.arg and isinstance(one.value, ast.Constant) for one in given):
                raise NoSource(f"`{name}` is a dataclass with options that are no literals")
            found = {str(one.arg): cast(ast.Constant, one.value).value for one in given}
        elif _is_ours(maker):
            node.decorator_list.remove(decorator)
        else:
            raise NoSource(f"`{name}` has a decorator that is not known")
    if found is not None and (found.get("slots") or node.bases):
        raise NoSource(f"`{name}` is a dataclass with slots or bases")
    return found


def _is_ours(maker: Any) -> bool:
    is_function = isinstance(maker, FunctionType) and maker.__module__.startswith("luyen.")
    return is_function and maker.__name__ in _MADE_BY_US


def _is_field(
    node: ast.expr, own: Mapping[str, Any], member: str, known: Mapping[str, Any]
) -> bool:
    """Whether a value is `field(...)` of literals and named factories, which are what they were."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        return False
    if known.get(node.func.id) is not dataclasses.field:
        return False
    fields = cast(dict[str, Any], own.get("__dataclass_fields__", {}))
    field: Any = fields.get(member)
    for one in node.keywords:
        if field is None or one.arg not in ("default", "default_factory", "repr", "compare"):
            return False
        now: Any = {
            "default": field.default,
            "default_factory": field.default_factory,
            "repr": field.repr,
            "compare": field.compare,
        }[one.arg]
        if isinstance(one.value, ast.Name):
            builtin = {"list": list, "dict": dict, "set": set}.get(one.value.id)
            if known.get(one.value.id, builtin) is not now:
                return False
        else:
            _demand_literal("field", member, one.value, now)
    return True


def _made_by_dataclass(
    value: type, node: ast.ClassDef, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What `dataclass` makes for fields like these."""
    fields = cast(dict[str, Any], vars(value).get("__dataclass_fields__", {}))
    content: dict[str, Any] = {"__annotations__": {**vars(value).get("__annotations__", {})}}
    for name, one in fields.items():
        if one.default is not dataclasses.MISSING:
            content[name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            content[name] = dataclasses.field(default_factory=one.default_factory)
    written = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
    content |= {name: vars(value)[name] for name in written if name in vars(value)}
    again: Any = dataclasses.dataclass(**options)(type(value.__name__, (), content))
    made: dict[str, Any] = {**vars(again)}
    return {
        name: one
        for name, one in made.items()
        if name not in content and name not in _OF_EVERY_CLASS
    }


def _is_made_alike(now: Any, made: Any) -> bool:
    if isinstance(made, FunctionType):
        if not isinstance(now, FunctionType):
            return False
        inner: Any = vars(made).get("__wrapped__")  # of `__repr__`
        is_inner = inner is None or _is_made_alike(vars(now).get("__wrapped__"), inner)
        is_plain = {*vars(now)} == {*vars(made)} and is_inner
        is_plain = is_plain and _exact(now.__defaults__) == _exact(made.__defaults__)
        return is_plain and have_same_code(now.__code__, made.__code__)
    if isinstance(made, MemberDescriptorType | dict):  # the fields, which are compared one by one
        return isinstance(now, MemberDescriptorType | dict)
    return repr(now) == repr(made)
