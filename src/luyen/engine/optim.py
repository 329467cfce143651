"""AdamW with fp32 masters, clipping, and the course of the learning rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from luyen.config.schema.optim import Optim


def rate(optim: Optim, *, step: int, total_steps: int | None) -> float:
    """Learning rate of a step, counted from 0.

    Linear warm-up, then constant, cosine, or constant with a linear end (wsd). After the last step
    cosine stays where it ended: it never climbs again.

    Example:
        >>> [rate(Optim(lr=1.0, lr_warmup_steps=2), step=s, total_steps=None) for s in range(3)]
        [0.5, 1.0, 1.0]
    """
    warm_up = optim.lr_warmup_steps
    if warm_up < 0:
        warm_up = int(optim.lr_warmup_steps_ratio * (total_steps or 0))
    if step < warm_up:
        return optim.lr * (step + 1) / warm_up
    if total_steps is None or optim.lr_scheduler_type == "constant":
        return optim.lr
    done = min(1.0, (step - warm_up) / max(1, total_steps - 1 - warm_up))
    low = optim.min_lr_ratio
    if optim.lr_scheduler_type == "cosine":
        share = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    else:
        # wsd: the last tenth comes down in a line.
        share = 1.0 if done < 0.9 else low + (1 - low) * (1 - done) / 0.1
    return optim.lr * share


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What an optimizer step did.

    Example:
        >>> Stepped(grad_norm=0.5, is_applied=True, lr=1e-6).is_applied
        True
    """

    grad_norm: float
    """Norm of the gradient before clipping."""
    is_applied: bool
    """False when the gradient was not finite: the weights were left as they are."""
    lr: float
    """Learning rate in force."""


@final
class MasterAdamW:
    """AdamW over fp32 masters. Parameters of another type keep gradients in fp32 as well.

    A gradient of a bf16 parameter is added to an fp32 buffer as soon as it is complete, so that
    accumulation over micro-batches does not round.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optim: Optim) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else _master(p) for p in self.parameters]
        self.clip_grad = optim.clip_grad
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            foreach=True,
        )

    def step(self, lr: float) -> Stepped:
        """Clip, update and clear; a gradient that is not finite is counted and never applied."""
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.clip_grad))
        is_finite = math.isfinite(norm)
        if is_finite:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    if parameter is not master:
                        parameter.copy_(master)
        self.adamw.zero_grad(set_to_none=True)
        return Stepped(grad_norm=norm, is_applied=is_finite, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters."""
        own = [m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        return {"adamw": self.adamw.state_dict(), "masters": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.adamw.load_state_dict(state["adamw"])
        own = [m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        with torch.no_grad():
            for master, saved in zip(own, state["masters"], strict=True):
                master.copy_(saved)


def _master(parameter: nn.Parameter) -> Tensor:
    """An fp32 copy that collects the parameter's gradients."""
    master = parameter.detach().float().clone().requires_grad_()

    def collect(p: Tensor) -> None:
        assert p.grad is not None
        fresh = p.grad.float()
        master.grad = fresh if master.grad is None else master.grad + fresh
        p.grad = None

    parameter.register_post_accumulate_grad_hook(collect)
    return master
