"""Refusals by name: shapes, NaN or infinity, unread hyper-parameters, results of plugins."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError, did_you_mean
from luyen.base.registry import Registry

T = TypeVar("T")


def require_same_shape(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise with both shapes unless x has the shape of `like`."""
    if x.shape != like.shape:
        raise UserError(
            name,
            tuple(x.shape),
            f"its shape differs from {like_name} {tuple(like.shape)}",
            "pass tensors over the same tokens",
        )


def require_float(name: str, x: Tensor) -> None:
    """Raise unless x is a floating-point tensor."""
    if not x.dtype.is_floating_point:
        raise UserError(name, str(x.dtype), "it must be a floating-point tensor", "cast it first")


def require_finite(name: str, x: Tensor, mask: Tensor | None = None) -> None:
    """Raise if x holds NaN or infinity where `mask` is True (everywhere without a mask).

    This waits for the device: call it at the edges of a step, never inside a micro-batch loop.
    """
    bad = ~torch.isfinite(x)
    if mask is not None:
        bad = bad & mask
    if bool(bad.any()):
        where = [int(index) for index in bad.nonzero()[0]]
        raise UserError(
            name,
            x[tuple(where)].item(),
            f"not finite at position {where} ({int(bad.sum())} such positions count)",
            "a value that could not be computed is a fault: drop the sample, do not average it",
        )


# Knobs of a registered function: the keyword arguments it reads, under their config keys.

_NOT_HYPERPARAMETERS = frozenset({"seed"})


def hyperparameter_names(*functions: Callable[..., Any]) -> tuple[str, ...]:
    """Sorted names of the keyword-only arguments of the functions; a seed is not a hyperparameter.

    Example:
        >>> def loss(x: float, *, clip_ratio: float = 0.2, seed: int = 0) -> float:
        ...     return x
        >>> hyperparameter_names(loss)
        ('clip_ratio',)
    """
    names: set[str] = set()
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names |= {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return tuple(sorted(names - _NOT_HYPERPARAMETERS))


def read_by(function: Callable[..., Any], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `hparams` that `function` reads."""
    names = hyperparameter_names(function)
    return {name: value for name, value in hparams.items() if name in names}


def require_known(owner: str, hparams: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise on the first keyword that `owner` (such as "policy loss `gspo`") does not read."""
    names = sorted(known)
    for name in sorted(hparams):
        if name not in names:
            listed = ", ".join(names) if names else "none"
            why = f"{owner} has no such hyperparameter (it has: {listed})"
            fix = did_you_mean(name, names) if names else "remove it"
            raise UserError(name, hparams[name], why, fix)


def require_positive(name: str, value: float, *, above: float = 0.0) -> None:
    """Raise unless value > above; NaN is refused too."""
    if not value > above:
        raise UserError(
            name, value, f"it must be greater than {above:g}", f"set {name} > {above:g}"
        )


def require_not_negative(name: str, value: float) -> None:
    """Raise unless value >= 0; NaN is refused too."""
    if not value >= 0:
        raise UserError(name, value, "it must be 0 or more", f"set {name} >= 0")


# Registered functions of plugins: an exception or a wrong result is a UserError. Built-in functions
# are called without this wrapper, so that their bugs keep the traceback.


def is_built_in(part: Callable[..., Any]) -> bool:
    """Whether a registered function is one of this package."""
    return str(part.__module__).startswith("luyen.")


def call_plugin(registry: Registry[Any], name: str, call: Callable[[], T]) -> T:
    """The result of a plugin's function; a UserError where it raises."""
    faults: list[BaseException] = []
    with boundary(faults):
        return call()
    why = f"it failed: {last_line(faults[0])}"
    raise UserError(registry.field, name, why, "correct the plugin") from faults[0]


def require_token_stream(
    registry: Registry[Any], name: str, stream: str, found: object, like: Tensor
) -> None:
    """Refuse a stream of a plugin that is not one number for each token."""
    if not isinstance(found, Tensor):
        refuse_plugin(registry, name, f"its `{stream}` is {kind_of(found)}, not a tensor")
    is_fit = found.shape == like.shape and found.device == like.device
    if not is_fit or not torch.is_floating_point(found):
        seen = f"{found.dtype} of shape {list(found.shape)} on {found.device}"
        wanted = f"one float for each of the {like.numel()} tokens, on {like.device}"
        refuse_plugin(registry, name, f"its `{stream}` is {seen}, and {wanted} is needed")


def refuse_plugin(registry: Registry[Any], name: str, why: str) -> NoReturn:
    """The UserError of a plugin that gave a wrong result."""
    raise UserError(registry.field, name, why, "correct the plugin; docs/extend.md has an example")


def kind_of(value: object) -> str:
    """What a value is, for a message."""
    return "nothing" if value is None else f"a {type(value).__name__}"
