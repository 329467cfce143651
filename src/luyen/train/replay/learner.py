"""What learns in a replay: the roles of the run without rows, rewards and files."""

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.schema.optim import Optim
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import Profile
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.engine.batch import PackedBatch
from luyen.engine.explain import Explained, explain
from luyen.runtime.local import LocalRoles
from luyen.runtime.pending import PendingUpdate
from luyen.train.build import total_steps
from luyen.train.build_learning import learning_rules
from luyen.train.build_roles import build_roles
from luyen.train.checkpointed import device_for
from luyen.train.learning import Learning, LearningRules
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.profile import StepProfiler
from luyen.train.state import LoopState

PLACE = "place"
"""Stream that says where a token stands in the batch of the step, through every mini-batch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The tokens of one optimizer step, explained before it was taken.

    Example:
        >>> Trace(place=torch.tensor([4, 5]), explained=None).place.tolist()
        [4, 5]
    """

    place: Tensor
    """Index of each token in the batch of the step."""
    explained: Explained
    """What the objective made of it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """Everything that decides what a step does to the weights, at one point of the run.

    Example:
        >>> Moment(loop=LoopState(step=3), roles={}).loop.step
        3
    """

    loop: LoopState
    """Progress of the loop."""
    roles: dict[str, Any]
    """Weights and optimizer state, copied."""


@final
class Replaying(Learning):
    """Learns from recorded rollouts. With `explains`, every optimizer step leaves a trace."""

    def __init__(
        self,
        *,
        config: RunConfig,
        roles: LocalRoles,
        rules: LearningRules,
        tokenizer: Tokenizer,
        steps: int,
    ) -> None:
        profiler = StepProfiler(Profile(), RunDirectory("."))
        super().__init__(
            config=config, roles=roles, rules=rules, profiler=profiler, total_steps=steps
        )
        self.local = roles
        self.tokenizer = tokenizer
        self.explains = False
        self.traces: list[Trace] = []

    def update_policy(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool,
    ) -> PendingUpdate:
        """One optimizer step of the policy, explained first where that is wanted."""
        if self.explains:
            explained = explain(self.local.actor, batch, objective, seed=seed)
            self.traces.append(Trace(place=batch.streams[PLACE], explained=explained))
        return super().update_policy(batch, objective, lr=lr, seed=seed, is_last=is_last)

    def moment(self) -> Moment:
        """Where it stands, to come back to."""
        entropy = self.entropy_controller
        loop = LoopState(
            step=self.step,
            version=self.version,
            skipped=self.skipped,
            kl_history=self.kl_history,
            kl_controller=self.kl_controller.state(),
            entropy_controller=entropy.state() if entropy is not None else None,
        )
        return Moment(loop=loop, roles=copy.deepcopy(self.local.state_dict()))

    def return_to(self, moment: Moment) -> None:
        """Stand where another stood: weights, optimizer state and coefficients."""
        self.local.load_state_dict(moment.roles)
        self.go_on_from(moment.loop)


def open_learner(config: RunConfig, *, rows: int | None) -> Replaying:
    """What a run with this configuration begins with, on the device of the run where it is here.

    `rows` are those of the run; None: unknown, which is refused where the learning rate depends on
    them.
    """
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    rules = learning_rules(config)
    renderer = Renderer(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    steps = _total_steps(config, rows)
    roles = build_roles(config, renderer, tokenizer, rules.needs, device_for(config))
    return Replaying(config=config, roles=roles, rules=rules, tokenizer=tokenizer, steps=steps)


def numbered(batch: PackedBatch) -> PackedBatch:
    """The batch with the place of each token beside it."""
    count = batch.tokens.numel()
    return batch.with_streams(**{PLACE: torch.arange(count, device=batch.tokens.device)})


def _total_steps(config: RunConfig, rows: int | None) -> int:
    if rows is not None or config.trainer.total_training_steps is not None:
        return total_steps(config, rows or 0)
    schedules = (config.actor_rollout_ref.actor.optim, config.critic.optim)
    if any(_depends_on_the_end(optim) for optim in schedules):
        why = "the learning rate follows the number of steps, and the run does not say how many "
        why += "rows it had: an older version began it"
        fix = "replay a run of this version, or one with trainer.total_training_steps"
        raise UserError("trainer.total_training_steps", None, why, fix)
    return 1


def _depends_on_the_end(optim: Optim) -> bool:
    warms_up = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    return warms_up or optim.lr_scheduler_type != "constant"
