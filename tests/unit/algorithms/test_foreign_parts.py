"""Estimators and losses of plugins that raise, give nonsense or change what they are given."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, cast

import pytest
import torch

from luyen.algorithms.advantages import Credit, CreditInputs, adv_estimators
from luyen.algorithms.advantages.inputs import call_estimator
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.algorithms.policy_losses.inputs import call_policy_loss
from luyen.base.errors import UserError

NAME = "of_a_plugin"
RAISED = [
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(),
    asyncio.CancelledError(),
    RecursionError("deep"),
    ValueError("no"),
]
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "shorter": lambda a: a[:-1],
    "deeper": lambda a: a[None],
    "whole numbers": lambda a: a.long(),
    "a list": lambda a: a.tolist(),
    "nothing": lambda _: None,
    "elsewhere": lambda a: a.to("meta"),
}


@pytest.fixture(autouse=True)
def unregistered() -> Generator[None]:
    yield
    for registry in (adv_estimators, policy_losses):
        registry._entries.pop(NAME, None)  # pyright: ignore[reportPrivateUsage]


def inputs() -> CreditInputs:
    layout = Layout(
        mask=torch.ones(4, dtype=torch.bool),
        offsets=torch.tensor([0, 2, 4]),
        groups=torch.tensor([0, 0]),
    )
    return CreditInputs(rewards=torch.tensor([0.0, 1.0, 0.0, 0.0]), layout=layout)


def of_loss() -> PolicyInputs:
    zeros = torch.zeros(4)
    return PolicyInputs(
        logp=zeros.clone().requires_grad_(),
        old_logp=zeros,
        advantages=zeros,
        layout=inputs().layout,
    )


@pytest.mark.parametrize("raised", RAISED, ids=lambda r: type(r).__name__)
def test_what_they_raise_is_an_error_with_their_name(raised: BaseException):
    def part(_: Any) -> Any:
        raise raised

    adv_estimators.register(NAME)(part)
    policy_losses.register(NAME)(part)
    with pytest.raises(
        UserError, match=f"adv_estimator = '{NAME}': it failed: {type(raised).__name__}"
    ):
        call_estimator(NAME, inputs(), {})
    with pytest.raises(
        UserError, match=f"loss_mode = '{NAME}': it failed: {type(raised).__name__}"
    ):
        call_policy_loss(NAME, of_loss(), {})


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_number_for_each_token_is_refused(wrong: str):
    change = WRONG[wrong]
    adv_estimators.register(NAME)(lambda i: Credit(advantages=change(i.rewards), returns=i.rewards))
    policy_losses.register(NAME)(lambda i: TokenLoss(per_token=change(i.logp), metrics={}))
    with pytest.raises(UserError, match=r"its `advantages` is|TypeCheckError"):
        call_estimator(NAME, inputs(), {})
    with pytest.raises(UserError, match=r"its `per_token` is|TypeCheckError"):
        call_policy_loss(NAME, of_loss(), {})


def test_something_else_than_credit_is_refused():
    adv_estimators.register(NAME)(cast(Any, lambda _: 5))  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(UserError, match="it gave a int, not a Credit"):
        call_estimator(NAME, inputs(), {})


def test_an_estimator_changes_nothing_of_ours():
    def part(given: CreditInputs) -> Credit:
        found = given.rewards.clone()
        given.rewards.zero_()
        given.layout.mask.zero_()
        return Credit(advantages=found.requires_grad_(), returns=found)

    adv_estimators.register(NAME)(part)
    own = inputs()
    found = call_estimator(NAME, own, {})
    assert own.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert own.layout.mask.all()
    assert not found.advantages.requires_grad
