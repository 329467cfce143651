"""What each step of an offline run learns from and how fast: a pure function of its number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.engine.lesson import Lesson
from luyen.engine.optim import rate
from luyen.engine.step import Updated
from luyen.train.offline.digests import stages_of
from luyen.train.offline.stage import OfflineStage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineCourse:
    """A stage with its rows and its schedule; a run follows it, and a replay follows it again.

    Example:
        >>> sorted(OfflineCourse.__slots__)
        ['config', 'data', 'stage', 'total_steps']
    """

    config: RunConfig
    """The whole configuration."""
    data: TrainData
    """The rows as prompts, and the order in which they are drawn."""
    stage: OfflineStage
    """What learns."""
    total_steps: int
    """Steps of the whole run, which schedules depend on."""

    def lesson(self, step: int) -> Lesson:
        """What a step learns from."""
        size = self.config.data.train_batch_size
        return self.stage.lesson(list(self.data.sampler.take((step - 1) * size, size)))

    def update(self, step: int, lesson: Lesson) -> dict[str, float]:
        """Take a step; what it measured, with its norm and its learning rate."""
        optim = self.config.actor_rollout_ref.actor.optim
        lr = rate(optim, step=step - 1, total_steps=self.total_steps)
        return update_metrics(self.stage.update(lesson, lr=lr))

    def stages(self, lesson: Lesson, update: Mapping[str, float]) -> dict[str, str]:
        """Digests of the step that was taken last."""
        uids = [self.data.train.prompts[i].uid for i in lesson.rows]
        return stages_of(uids, lesson, update, self.stage.state())


def update_metrics(done: Updated) -> dict[str, float]:
    """What an optimizer step measured, with its norm and its learning rate."""
    stepped = done.stepped
    return {**done.metrics, "actor/grad_norm": stepped.grad_norm, "actor/lr": stepped.lr}
