"""Modules that the source text of an object may import, and whether they are as installed.

What is imported elsewhere is what is installed there. So a module must be the one that its name
gives, and a function or class that is taken from it must have been compiled from an installed file.
"""

import ast
import builtins
import importlib.util
import inspect
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from luyen.base.source_files import NoSource, definition_of

HERE = ("__main__", "builtins")
"""Modules that another process cannot import by name, or need not."""
_REACHING = ("gc", "inspect", "builtins", "importlib", "ctypes", "runpy", "code", "codeop")
_PARTLY = {
    "sys": {"stderr", "stdout", "maxsize", "byteorder", "float_info", "version_info", "platform"},
    "types": {"SimpleNamespace", "MappingProxyType"},
    "pickle": set[str](),
    "marshal": set[str](),
}
"""Modules that reach names which a source text does not show, and what may be taken from them."""
_UNSEEN = (
    *("eval", "exec", "globals", "locals", "vars", "dir", "compile", "__import__", "setattr"),
    *("delattr", "input", "breakpoint", "help", "exit", "quit", "__build_class__"),
)
_SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "call", "class", "name", "len", "iter", "next", "contains"),
        *("getitem", "setitem", "enter", "exit", "eq", "ne", "lt", "le", "gt", "ge", "hash"),
        *("str", "repr", "bool", "add", "sub", "mul", "setattr", "doc"),
    )
)
_FROZEN = ("<frozen ", "<__array_function__ internals>")


@lru_cache
def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple({str(form) for one in found for form in (Path(one), Path(one).resolve())})


def _is_installed_file(path: str) -> bool:
    is_below = any(path.startswith(f"{folder}/") for folder in _folders())
    return is_below or path.startswith(_FROZEN) or path.startswith(_package_folder())


@lru_cache
def _package_folder() -> str:
    """Our own package, which may be installed from a working tree."""
    return f"{Path(__file__).parent.parent}/"


def is_installed(name: str) -> bool:
    """Whether a module belongs to Python or to an installed package, by the files it is made of.

    Example:
        >>> is_installed("json"), is_installed("math"), is_installed("no_such_module")
        (True, True, False)
    """
    root = name.partition(".")[0]
    if root in sys.builtin_module_names:
        return True
    module = sys.modules.get(root)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(root)
    except (ValueError, ImportError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
    return spec.origin in ("built-in", "frozen") or (
        bool(places) and all(_is_installed_file(str(place)) for place in places)
    )


def demand_module(module: ModuleType) -> None:
    """NoSource for a module that another process does not get by the same name."""
    name = module.__name__
    spec = module.__spec__
    is_named = spec is not None and spec.name == name and sys.modules.get(name) is module
    if not is_named or name in HERE:
        raise NoSource(f"the module `{name}` cannot be imported by its name")
    if name.partition(".")[0] in _REACHING:
        raise NoSource(f"the module `{name}` can reach any name")


def demand_member(module: ModuleType, member: str) -> Any:
    """A member of a module, None for one it does not have; NoSource for one that was put there."""
    name = module.__name__
    demand_module(module)
    if member not in _PARTLY.get(name, {member}):
        raise NoSource(f"`{name}.{member}` can reach any name")
    found = vars(module).get(member)
    if not is_installed(name):
        return found
    home = found.__name__ if isinstance(found, ModuleType) else name
    if not is_installed(home) or not is_of_a_library(found):
        raise NoSource(f"`{name}.{member}` is not what is installed")
    return found


def is_of_a_library(value: Any) -> bool:
    """Whether a function, or a class with all its methods, was compiled from installed files."""
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith("<string>") and _is_library_code(value)
    if isinstance(value, type):
        bases = [one for one in value.__mro__ if one is not object]
        parts = [part for one in bases for part in vars(one).values()]
        is_own = all(_is_library_part(one) for one in parts)
        return is_own and all(is_installed(str(one.__module__)) for one in bases)
    return True


def _is_library_code(value: FunctionType) -> bool:
    file, home = value.__code__.co_filename, str(value.__globals__.get("__name__"))
    if file.startswith(("<string>", "<attrs generated")):  # made by `dataclass`, `namedtuple`
        return home.startswith("namedtuple_") or is_installed(home)
    if file.startswith(_FROZEN):
        return True
    if not _is_installed_file(file):
        return False
    try:
        definition_of(value.__code__)  # the file has this code: it was not replaced
    except NoSource:
        return False
    return True


def _is_library_part(value: Any) -> bool:
    """Whether a member of a class comes from installed files, as far as it shows."""
    inner: Any = value.fget if isinstance(value, property) else value
    if isinstance(inner, staticmethod | classmethod):
        inner = cast(Any, inner).__func__
    if isinstance(inner, FunctionType):
        return _is_library_code(inner)
    return is_installed(type(value).__module__)


def home_of(value: Any) -> tuple[ModuleType, str] | None:
    """The module and the name under which another process finds a definition."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return None
    module, path = str(value.__module__), str(value.__qualname__)  # of C it may have no module
    home = sys.modules.get(module)
    if home is None or "." in path or module in HERE or home.__spec__ is None:
        return None
    return (home, path) if vars(home).get(path) is value else None


def demand_builtin(name: str) -> None:
    """NoSource for a built-in that was replaced, or that reaches names a text does not show."""
    if name in _UNSEEN:
        raise NoSource(f"`{name}` can reach any name")
    value = vars(builtins)[name]
    if isinstance(value, BuiltinFunctionType):
        is_own = value.__module__ in ("builtins", "io", "_io") and value.__name__ == name
    elif isinstance(value, type):
        is_alias = name in ("IOError", "EnvironmentError") and value is OSError
        is_own = value.__module__ == "builtins" and (value.__name__ == name or is_alias)
    else:
        is_own = name in ("NotImplemented", "Ellipsis", "__debug__")
    if not is_own:
        raise NoSource(f"the built-in `{name}` was replaced")


def demand_known_parts(name: str, node: ast.AST, known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """NoSource for a definition that reaches what its text does not show.

    The result is what it takes from modules of one's own, as pairs of module and member, and from
    modules inside of packages, with an empty member.
    """
    found = [*_inner_imports(name, node)]
    inner = {alias: module for alias, module, _ in found if isinstance(module, ModuleType)}
    taken = [(module.__name__, one) for _, module, one in found if module is not None and one]
    above = {id(child): part for part in ast.walk(node) for child in ast.iter_child_nodes(part)}
    for part in ast.walk(node):
        word = part.attr if isinstance(part, ast.Attribute) else ""
        if word.startswith("__") and word.endswith("__") and word not in _SPECIAL:
            raise NoSource(f"`{name}` uses `{word}`, which can reach any name")
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            module = inner.get(part.id, known.get(part.id))
            if isinstance(module, ModuleType):
                taken += _members_taken(module, part, above)
    return taken


def _inner_imports(name: str, node: ast.AST) -> Iterator[tuple[str, ModuleType | None, str]]:
    """Imports inside of a definition: the name, its module here, and the member taken from it."""
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and (part.level or part.module is None):
            raise NoSource(f"`{name}` imports from the package that it is in")
        if isinstance(part, ast.ImportFrom):
            module = _imported(name, cast(str, part.module))
            for one in part.names:
                member = one.name
                if module is not None:
                    value = demand_member(module, member)
                    if isinstance(value, ModuleType):
                        yield one.asname or member, value, ""
                yield "", module, member
        elif isinstance(part, ast.Import):
            for one in part.names:
                whole = _imported(name, one.name)
                root = sys.modules.get(one.name.partition(".")[0])
                yield one.asname or one.name.partition(".")[0], whole if one.asname else root, ""


def _imported(name: str, module: str) -> ModuleType | None:
    """A module that a definition imports when it is called; None: it was not imported yet."""
    if module.partition(".")[0] in (*_REACHING, *HERE):
        raise NoSource(f"`{name}` imports `{module}`, which can reach any name")
    found = sys.modules.get(module)
    if found is not None:
        demand_module(found)
    elif not is_installed(module):
        raise NoSource(f"`{name}` imports `{module}`, which is not installed")
    return found


def _members_taken(
    module: ModuleType, node: ast.expr, above: Mapping[int, ast.AST]
) -> Iterator[tuple[str, str]]:
    """Members that `module.name.name` takes, each demanded to be as it is installed."""
    value: Any = module
    while isinstance(value, ModuleType):
        parent = above.get(id(node))
        if not isinstance(parent, ast.Attribute):
            raise NoSource(f"the module `{value.__name__}` is used as a value")
        if not isinstance(parent.ctx, ast.Load):
            raise NoSource(f"`{value.__name__}.{parent.attr}` is changed")
        home, node = value, parent
        value = demand_member(home, parent.attr)
        if isinstance(value, ModuleType):
            yield value.__name__, ""
        else:
            yield home.__name__, parent.attr
