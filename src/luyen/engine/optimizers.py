"""The optimizers that `optim.name` names, over fp32 tensors.

`adamw_8bit` and `muon` update some tensors and leave the rest to AdamW. All of them decay weights
apart from the gradient, and take their learning rate of a step from the caller.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.config.optimizer_memory import LEAST_8BIT
from luyen.config.schema.actor_rollout_ref import OptimConfig

ADAMW = "adamw"
ADAMW_8BIT = "adamw_8bit"
MUON = "muon"

_FIRST_MOMENTS = {ADAMW: "exp_avg", ADAMW_8BIT: "state1", MUON: "momentum_buffer"}
_QUANTISED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes has the tensors of a state."""


def make_optimizers(
    tensors: Sequence[Tensor], hidden: Container[int], optim: OptimConfig
) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by name, which share the tensors; `hidden` are ids of matrices for Muon."""
    if optim.name == ADAMW_8BIT:
        large = [t for t in tensors if t.numel() >= LEAST_8BIT]
        small = [t for t in tensors if t.numel() < LEAST_8BIT]
        made = {ADAMW: _adamw(small, optim)} if small else {}
        return {**made, **({ADAMW_8BIT: _adamw_8bit(large, optim)} if large else {})}
    if optim.name == MUON:
        matrices = [t for t in tensors if id(t) in hidden]
        rest = [t for t in tensors if id(t) not in hidden]
        made = {ADAMW: _adamw(rest, optim)} if rest else {}
        return {**made, **({MUON: _muon(matrices, optim)} if matrices else {})}
    return {ADAMW: _adamw(tensors, optim)}


def _adamw(tensors: Sequence[Tensor], optim: OptimConfig) -> torch.optim.Optimizer:
    is_on_gpu = all(t.is_cuda for t in tensors)
    return torch.optim.AdamW(
        tensors,
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        # On GPUs one fused kernel over all weights.
        **({"fused": True} if is_on_gpu else {"foreach": True}),
    )


def _adamw_8bit(tensors: Sequence[Tensor], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW whose moments are 8-bit numbers, with an fp32 scale for each block of 256."""
    try:
        from bitsandbytes import optim as library
    except ImportError:
        why, fix = "bitsandbytes is not installed", "pip install 'luyen[quant]'"
        raise UserError("optim.name", ADAMW_8BIT, why, fix) from None
    own: Any = library
    return own.AdamW8bit(
        tensors,
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        min_8bit_size=LEAST_8BIT,
    )


def _muon(tensors: Sequence[Tensor], optim: OptimConfig) -> torch.optim.Optimizer:
    """Muon with updates as large as AdamW's: 0.2·√max(rows, columns) times the learning rate.

    A learning rate and a weight decay that suit AdamW therefore suit it too.
    """
    return torch.optim.Muon(
        tensors,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )


def first_moments(name: str, state: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state that hold the gradient of the step, by digest name."""
    moment = _FIRST_MOMENTS[name]
    prefix = "" if name == ADAMW else f"{name}/"
    found: dict[str, Tensor] = {}
    for index, kept in state.items():
        own = kept.get(_QUANTISED, kept)
        found[f"{prefix}{index}/{moment}"] = own[moment]
        if name == ADAMW_8BIT:
            found[f"{prefix}{index}/absmax1"] = own["absmax1"]
    return found
