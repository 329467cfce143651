"""Optimizers over fp32 masters, gradient clipping over shards, and the learning-rate schedule.

`adamw_8bit` and `muon` update some tensors and leave the rest to AdamW. All of them decay weights
apart from the gradient, and take their learning rate of a step from the caller.
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from luyen.base.errors import UserError
from luyen.config.optimizer_memory import LEAST_8BIT
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.fsdp import REPLICATE, decoder_layers
from luyen.engine.host_optimizer import HostAdamW, OffloadedWeight, collector_of, host_copy
from luyen.engine.tensor_parallel import is_counted
from luyen.models.weights import export_dtype

# Gradient clipping over shards.

_norms: Any = vars(torch)["_foreach_norm"]
_multiply: Any = vars(torch)["_foreach_mul_"]


def clip_sharded(gradients: Sequence[Tensor], most: float) -> float:
    """Clip gradients to the norm `most`; returns their norm over all shards, equal on every rank.

    A gradient that is not finite on one rank makes the norm on all ranks not finite.
    """
    shards = [g for g in gradients if isinstance(g, DTensor)]
    assert shards, "the step has no gradients"
    assert len(shards) == len(gradients), "a gradient is not sharded"
    local = [shard.to_local() for shard in shards]
    counted = [x for shard, x in zip(shards, local, strict=True) if is_counted(shard)]
    mesh = shards[0].device_mesh
    total = torch.zeros((), dtype=torch.float64, device=local[0].device)
    if counted:
        total = torch.stack(_norms(counted)).double().square().sum()
    names = mesh.mesh_dim_names
    assert names is not None, "`join_ranks` names the dimensions"
    for dimension, name in enumerate(names):
        if name != REPLICATE:  # copies have the same gradients
            dist.all_reduce(total, group=mesh.get_group(dimension))
    norm = math.sqrt(float(total)) if math.isfinite(float(total)) else math.nan
    factor = most / (norm + 1e-6)
    if factor < 1.0:
        _multiply(local, factor)
    return norm


_copy_all: Any = vars(torch)["_foreach_copy_"]
"""Copies many tensors at once; PyTorch exports it without declaring it."""


def learning_rate(optim: OptimConfig, *, step: int, total_steps: int | None) -> float:
    """Learning rate of a step, counted from 0.

    Linear warm-up, then constant, cosine, a line down to the end (linear), or constant with such a
    line over the last tenth (wsd). After the last step the rate stays at its final value.

    Example:
        >>> optim = OptimConfig(lr=1.0, lr_warmup_steps=2)
        >>> [learning_rate(optim, step=s, total_steps=None) for s in range(3)]
        [0.5, 1.0, 1.0]
    """
    warm_up = optim.lr_warmup_steps
    if warm_up < 0:
        warm_up = int(optim.lr_warmup_steps_ratio * (total_steps or 0))
    if total_steps is not None:
        warm_up = min(warm_up, total_steps)  # at least the last step has the full rate
    if step < warm_up:
        return optim.lr * (step + 1) / warm_up
    if total_steps is None or optim.lr_scheduler_type == "constant":
        return optim.lr
    done = min(1.0, (step - warm_up) / max(1, total_steps - 1 - warm_up))
    low = optim.min_lr_ratio
    if optim.lr_scheduler_type == "cosine":
        share = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    elif optim.lr_scheduler_type == "linear":
        share = low + (1 - low) * (1 - done)
    else:
        # wsd: linear decay over the last tenth.
        share = 1.0 if done < 0.9 else low + (1 - low) * (1 - done) / 0.1
    return optim.lr * share


MASTERS = "masters"
"""Where `MasterOptimizer.state_dict` has the masters, next to its optimizers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Result of an optimizer step.

    Example:
        >>> OptimizerStep(grad_norm=0.5, is_applied=True, lr=1e-6).is_applied
        True
    """

    grad_norm: float
    """Norm of the gradient before clipping."""
    is_applied: bool
    """False if the gradient was not finite: the weights did not change."""
    lr: float
    """Learning rate of the step."""


class ComputeWeights(Protocol):
    """Weights that passes compute with, where they are not the parameters that learn."""

    def collect_gradients(self) -> None:
        """Give every parameter that learns its gradient."""
        ...

    def refresh(self) -> None:
        """Compute the weights again from the parameters, which have changed."""
        ...


@final
class MasterOptimizer:
    """AdamW, 8-bit AdamW or Muon over fp32 masters. Other parameters keep fp32 gradients as well.

    A gradient of a bf16 parameter is added to an fp32 buffer as soon as it is complete, so that
    accumulation over micro-batches does not round. Parameters may be shards (`luyen.engine.fsdp`):
    every rank then holds its part of masters and moments, clips by the norm over all ranks, and
    decides alike whether a step is applied. Only AdamW takes shards.

    With `offload` masters and moments of whole weights are in host memory
    (`luyen.engine.host_optimizer`); gradients stay where the weights are.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optim: OptimConfig,
        *,
        hidden: Iterable[nn.Parameter] = (),
        offload: bool = False,
        compute: ComputeWeights | None = None,
    ) -> None:
        """`hidden` are the matrices that Muon updates; AdamW updates the rest.

        `compute`: what passes compute with; None: the parameters themselves.
        """
        self._compute = compute
        self.parameters = [p for p in parameters if p.requires_grad]
        self._hooks: list[RemovableHandle] = []
        self.masters = [_master(p, offload=offload) for p in self.parameters]
        pairs = list(zip(self.parameters, self.masters, strict=True))
        self._collectors = [m if m is p or not offload else collector_of(p) for p, m in pairs]
        """Tensors whose `grad` is the gradient of the master."""
        for (parameter, master), collector in zip(pairs, self._collectors, strict=True):
            if parameter is not master:
                self._hooks.append(_collect(parameter, collector))
        self.clip_grad = optim.clip_grad
        self._is_on_gpu = all(m.is_cuda for m in self.masters)
        self.is_sharded = any(isinstance(m, DTensor) for m in self.masters)
        """Whether this rank holds parts of the parameters."""
        names = {id(p) for p in hidden}
        matrices = {id(m) for p, m in pairs if id(p) in names}
        self._is_offloaded = offload
        self.optimizers = (
            self._in_host_memory(optim)
            if offload
            else make_optimizers(self.masters, matrices, optim)
        )
        """By name; each has some of the masters."""
        assert not self.is_sharded or [*self.optimizers] == [ADAMW], "only AdamW takes shards"

    def _in_host_memory(self, optim: OptimConfig) -> dict[str, torch.optim.Optimizer]:
        assert optim.name == ADAMW, "the configuration was checked"
        three = zip(self.parameters, self.masters, self._collectors, strict=True)
        weights = [OffloadedWeight(weight=p, master=m, collector=c) for p, m, c in three]
        return {ADAMW: HostAdamW(weights, optim)}

    def step(self, lr: float) -> OptimizerStep:
        """Clip, update and clear gradients; a gradient that is not finite is not applied."""
        if self._compute is not None:
            self._compute.collect_gradients()
        norm = self._clip()
        is_finite = math.isfinite(norm)
        if is_finite:
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            copied = [
                (p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m
            ]
            if copied and not self._is_offloaded:  # else the step has rounded them
                with torch.no_grad():
                    _copy_all([p for p, _ in copied], [m for _, m in copied])
            if self._compute is not None:
                self._compute.refresh()
        self.zero_grad()
        return OptimizerStep(grad_norm=norm, is_applied=is_finite, lr=lr)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for collector in self._collectors:
            collector.grad = None

    def _clip(self) -> float:
        if not self.is_sharded:
            return float(nn.utils.clip_grad_norm_(self._collectors, self.clip_grad))
        return clip_sharded([m.grad for m in self.masters if m.grad is not None], self.clip_grad)

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters. Sharded moments exist before the first step too."""
        if self.is_sharded:
            self._make_moments()
        own = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {**own, MASTERS: self.separate_masters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; hyperparameters stay as configured."""
        self.refuse_others(state)
        for name, optimizer in self.optimizers.items():
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name]["state"], "param_groups": groups})
        with torch.no_grad():
            for master, saved in zip(self.separate_masters(), state[MASTERS], strict=True):
                master.copy_(saved)
        if self._compute is not None:
            self._compute.refresh()

    def refuse_others(self, saved: Iterable[str]) -> None:
        """A UserError unless these parts of a state are those of the optimizers here.

        One that has some of the tensors numbers them otherwise than one that has all.
        """
        there = sorted({*saved} - {MASTERS})
        if there != sorted(self.optimizers):
            own, others = " and ".join(sorted(self.optimizers)), " and ".join(there)
            why = f"the checkpoint holds the state of {others}: it was made with another optimizer"
            raise UserError("optim.name", own, why, "set it as it was")

    def separate_masters(self) -> list[Tensor]:
        """Masters of the parameters whose export dtype is not fp32."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return [m.detach() for p, m in pairs if export_dtype(p) != m.dtype]

    def _make_moments(self) -> None:
        """Create zero moments, so that a checkpoint can be loaded into them."""
        adamw = self.optimizers[ADAMW]
        for master in self.masters:
            if not adamw.state[master]:
                step = torch.zeros((), device=master.device if self._is_on_gpu else "cpu")
                moments = {k: torch.zeros_like(master) for k in ("exp_avg", "exp_avg_sq")}
                adamw.state[master] = {"step": step, **moments}

    def release(self) -> None:
        """Remove the gradient hooks: another optimizer may use the parameters."""
        for hook in self._hooks:
            hook.remove()


def _master(parameter: nn.Parameter, *, offload: bool) -> Tensor:
    """The parameter itself, or an fp32 copy."""
    if parameter.dtype == torch.float32:
        return parameter
    if offload:
        return host_copy(parameter.detach(), parameter.device)
    return parameter.detach().float().clone().requires_grad_()


def _collect(parameter: nn.Parameter, collector: Tensor) -> RemovableHandle:
    """Add gradients of the parameter to the fp32 one of the collector, and drop them."""

    def collect(p: Tensor) -> None:
        assert p.grad is not None
        if collector.grad is None:
            collector.grad = p.grad.float()
        else:
            collector.grad.add_(p.grad)
        p.grad = None

    return parameter.register_post_accumulate_grad_hook(collect)


def build_optimizer(
    module: nn.Module,
    optim: OptimConfig,
    *,
    offload: bool = False,
    compute: ComputeWeights | None = None,
) -> MasterOptimizer:
    """The optimizer of a model's trained weights; Muon gets the matrices of decoder layers."""
    layers = decoder_layers(module)
    hidden = [p for layer in layers for p in layer.parameters() if p.dim() == 2]
    return MasterOptimizer(
        module.parameters(), optim, hidden=hidden, offload=offload, compute=compute
    )


# The optimizers that `optim.name` names, over fp32 tensors.

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
