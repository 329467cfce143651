"""Raw values told apart by shape, for rows whose types nobody promised."""

from typing import Any, TypeGuard, cast


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether the value has named fields."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether the value is a list."""
    return isinstance(value, list)


def without_none(value: Any) -> Any:
    """The value without fields that are null: columnar files fill absent fields with null.

    Example:
        >>> without_none({"role": "user", "tool_calls": None})
        {'role': 'user'}
    """
    if is_object(value):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if is_list(value) else value


def canonical(value: Any) -> Any:
    """The value with text for keys and a fixed order everywhere, ready to be hashed as JSON."""
    if is_object(value):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in cast(list[Any], value)]
    if isinstance(value, set | frozenset):
        return sorted(str(canonical(v)) for v in cast(set[Any], value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)
