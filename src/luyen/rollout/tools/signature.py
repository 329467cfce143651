"""The JSON schema of a typed, documented Python function, and the values of a call's arguments."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast, final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from luyen.base.errors import UserError, did_you_mean
from luyen.rollout.tools.user_code import InvalidArguments

# Google-style docstrings: the description of a function and of its arguments.

_SECTION = re.compile(r"^(Args|Arguments|Returns?|Yields?|Raises|Examples?|Notes?|Attributes):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and what `Args:` says about each argument.

    Example:
        >>> read_docstring('''Weather of a city.
        ...
        ...     Args:
        ...         city: Its name,
        ...             in English.
        ... ''')
        ('Weather of a city.', {'city': 'Its name, in English.'})
    """
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading is not None:
            current = "Args" if heading[1] == "Arguments" else heading[1]
            sections.setdefault(current, [])
        else:
            sections[current].append(line)
    return _paragraphs(sections[""]), _entries(sections.get("Args", []))


def _paragraphs(lines: list[str]) -> str:
    """Lines of one paragraph joined by spaces; paragraphs stay apart."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip())
    return "\n\n".join(" ".join(block.split()) for block in blocks)


def _entries(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name, depth = "", None
    for line in inspect.cleandoc("\n" + "\n".join(lines)).splitlines():
        entry = _ENTRY.match(line)
        indent = len(line) - len(line.lstrip())
        if entry is not None and (depth is None or indent <= depth):
            name, depth = entry[1], indent
            found[name] = entry[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


_ORDER = ("type", "description", "properties", "required", "items", "enum")
_PASSABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@final
class Signature:
    """The schema of a function, and the conversion of arguments to its Python values.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> signature = Signature(add, name="add")
        >>> signature.schema["function"]["parameters"]["required"]
        ['a']
        >>> signature.bind({"a": 3})
        {'a': 3}
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        doc: str | None = None,
        method: bool = False,
    ) -> None:
        """`doc` replaces the function's docstring; the first parameter of a `method` is not passed.

        A UserError for what a schema cannot express: an untyped parameter, no description.
        """
        text = doc or inspect.getdoc(function)
        if not text:
            raise _unfit(
                name, "it has no docstring, and the policy reads nothing else", "write one"
            )
        description, said = read_docstring(text)
        parameters = list(inspect.signature(function).parameters.values())[int(method) :]
        hints = _hints(function, name)
        self._names: dict[str, str] = {}
        fields: dict[str, Any] = {}
        for i, parameter in enumerate(parameters):
            _require_passable(parameter, hints, name)
            default = ... if parameter.default is parameter.empty else parameter.default
            about = Field(default, alias=parameter.name, description=said.pop(parameter.name, None))
            fields[f"argument_{i}"] = (hints[parameter.name], about)
            self._names[f"argument_{i}"] = parameter.name
        for stray in said:
            fix = did_you_mean(stray, self._names.values())
            raise _unfit(name, f"its docstring describes `{stray}`, which it does not take", fix)
        self._model = _model(name, fields)
        parameters_schema = _parameters_schema(self._model, name)
        function_schema = {
            "name": name,
            "description": description,
            "parameters": parameters_schema,
        }
        self.schema: dict[str, Any] = {"type": "function", "function": function_schema}

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Python values by name: enums, models; what was not passed is left to the function."""
        try:
            read = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidArguments(f"argument `{where}`: {first['msg']}") from error
        given = read.model_fields_set
        return {name: getattr(read, field) for field, name in self._names.items() if field in given}


class _Quiet(GenerateJsonSchema):
    """A default without a JSON form is left out of the schema, without a warning."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _unfit(name: str, why: str, fix: str) -> UserError:
    return UserError("tool", name, why, fix)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        why = f"its annotations cannot be read: {error}"
        raise _unfit(name, why, "import the types at the top of the file") from error


def _require_passable(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> None:
    if parameter.kind not in _PASSABLE:
        why = f"a policy passes arguments by name, and `{parameter}` takes none by name"
        raise _unfit(name, why, "list every argument with a name and a type")
    if parameter.name not in hints:
        why = f"its parameter `{parameter.name}` has no type"
        raise _unfit(name, why, f"annotate it, e.g. `{parameter.name}: str`")


def _model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticSchemaGenerationError as error:
        why = f"a parameter has a type that JSON cannot express: {_first(error)}"
        raise _unfit(name, why, "take str, int, float, bool, list, dict or a model") from error


def _parameters_schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Quiet)
    except PydanticInvalidForJsonSchema as error:
        why = f"a parameter has a type that JSON cannot express: {_first(error)}"
        raise _unfit(name, why, "take str, int, float, bool, list, dict or a model") from error
    definitions = schema.pop("$defs", {})
    schema.pop("additionalProperties", None)  # unknown arguments are refused in any case
    plain = cast(dict[str, Any], _plain(schema, definitions, ()))
    if _refers(plain):  # a type that contains itself stays a definition
        plain["$defs"] = {key: _plain(value, {}, ()) for key, value in definitions.items()}
    plain.setdefault("required", [])
    return _ordered(plain)


def _plain(node: Any, definitions: Mapping[str, Any], above: tuple[str, ...]) -> Any:
    """A schema with definitions put in place of their names, without the titles pydantic adds."""
    if isinstance(node, list):
        return [_plain(entry, definitions, above) for entry in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    schema = cast(dict[str, Any], node)
    named = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if named in definitions and named not in above:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain({**definitions[named], **rest}, definitions, (*above, named))
    return {
        key: {name: _plain(below, definitions, above) for name, below in value.items()}
        if key == "properties"
        else _plain(value, definitions, above)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    """The keys in the order in which schemas are usually written, since templates print them."""
    first = [key for key in _ORDER if key in schema]
    keys = [*first, *(key for key in schema if key not in first)]
    return {key: _below(key, schema[key]) for key in keys}


def _below(key: str, value: Any) -> Any:
    if key in ("properties", "$defs"):
        return {name: _below("", below) for name, below in value.items()}
    if key == "default":
        return value
    if isinstance(value, list):
        return [_below("", entry) for entry in cast(list[Any], value)]
    return _ordered(cast(dict[str, Any], value)) if isinstance(value, dict) else value


def _refers(node: Any) -> bool:
    if isinstance(node, list):
        return any(_refers(entry) for entry in cast(list[Any], node))
    if not isinstance(node, dict):
        return False
    schema = cast(dict[str, Any], node)
    return "$ref" in schema or any(_refers(value) for value in schema.values())


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]
