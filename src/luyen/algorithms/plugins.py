"""Calls registered estimators and losses; a plugin's exception or wrong result is a UserError.

Built-in functions are called without that wrapper, so their bugs keep the traceback.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.algorithms.policy_losses.inputs import PolicyInputs, TokenLoss, policy_losses
from luyen.base.boundary import boundary, last_line, own_copy
from luyen.base.errors import UserError
from luyen.base.registry import Registry

T = TypeVar("T")


def call_estimator(name: str, inputs: CreditInputs, hparams: Mapping[str, Any]) -> Credit:
    """The credit by a registered estimator; one of a plugin sees copies of the inputs."""
    estimator = adv_estimators.get(name)
    if _is_ours(estimator):
        return estimator(inputs, **hparams)
    given = own_copy(inputs)
    found = _called(adv_estimators, name, lambda: estimator(given, **hparams))
    if not isinstance(cast(object, found), Credit):
        _refuse(adv_estimators, name, f"it gave {_kind(found)}, not a Credit")
    for stream in ("advantages", "returns"):
        _demand(adv_estimators, name, stream, getattr(found, stream), inputs.rewards)
    return Credit(
        advantages=found.advantages.detach(), returns=found.returns.detach(), metrics=found.metrics
    )


def call_policy_loss(name: str, inputs: PolicyInputs, hparams: Mapping[str, Any]) -> TokenLoss:
    """The loss of each token by a registered loss, which the gradient flows through."""
    loss = policy_losses.get(name)
    if _is_ours(loss):
        return loss(inputs, **hparams)
    found = _called(policy_losses, name, lambda: loss(inputs, **hparams))
    if not isinstance(cast(object, found), TokenLoss):
        _refuse(policy_losses, name, f"it gave {_kind(found)}, not a TokenLoss")
    _demand(policy_losses, name, "per_token", found.per_token, inputs.logp)
    return found


def _is_ours(part: Callable[..., Any]) -> bool:
    return str(part.__module__).startswith("luyen.")


def _called(registry: Registry[Any], name: str, call: Callable[[], T]) -> T:
    faults: list[BaseException] = []
    with boundary(faults):
        return call()
    why = f"it failed: {last_line(faults[0])}"
    raise UserError(registry.field, name, why, "correct the plugin") from faults[0]


def _demand(registry: Registry[Any], name: str, stream: str, found: object, like: Tensor) -> None:
    """Refuse what is no number for each token: it would be mistaken for another's."""
    if not isinstance(found, Tensor):
        _refuse(registry, name, f"its `{stream}` is {_kind(found)}, not a tensor")
    is_fit = found.shape == like.shape and found.device == like.device
    if not is_fit or not torch.is_floating_point(found):
        seen = f"{found.dtype} of shape {list(found.shape)} on {found.device}"
        wanted = f"one float for each of the {like.numel()} tokens, on {like.device}"
        _refuse(registry, name, f"its `{stream}` is {seen}, and {wanted} is needed")


def _refuse(registry: Registry[Any], name: str, why: str) -> NoReturn:
    raise UserError(registry.field, name, why, "correct the plugin; docs/extend.md has an example")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
