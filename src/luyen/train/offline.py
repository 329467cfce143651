"""Learning from given conversations: draw rows, pack them, take an optimizer step."""

from collections.abc import Iterator
from typing import final

import torch

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Source
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.render import Rendered, Renderer
from luyen.engine.batch import PackedBatch, pack
from luyen.engine.optim import rate
from luyen.engine.supervised import SupervisedEngine
from luyen.telemetry.spans import SPANS, span
from luyen.train.interrupt import Interruption
from luyen.train.profile import StepProfiler
from luyen.train.supervised_files import SupervisedFiles
from luyen.train.watchdog import Watchdog


@final
class OfflineRun:
    """Parts and progress of a supervised run."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainData,
        engine: SupervisedEngine,
        files: SupervisedFiles,
        *,
        total_steps: int,
    ) -> None:
        self.config = config
        self.data = data
        self.engine = engine
        self.files = files
        self.total_steps = total_steps
        self.step = 0
        self.first_nll: float | None = None
        self.last_nll: float | None = None
        self.interruption = Interruption()
        self.watchdog = Watchdog(config.trainer.watchdog, files.directory.events)
        profile, is_cuda = config.trainer.profile, engine.policy.device.type == "cuda"
        self.profiler = StepProfiler(profile, files.directory, is_cuda=is_cuda)
        self.trial_steps: int | None = None
        """Where a run ends that is only measured and keeps no checkpoint; None: a whole run."""
        self.saved = 0
        """Step of the newest checkpoint; the beginning needs none."""

    def batches(self) -> Iterator[PackedBatch]:
        """The batch of each step that is left; rows are a pure function of the step."""
        size = self.config.data.train_batch_size
        last = min(self.total_steps, self.trial_steps or self.total_steps)
        while self.step < last and not self.interruption.is_wanted:
            rows = self.data.sampler.take(self.step * size, size)
            prompts = [self.data.train.prompts[i] for i in rows]
            with self.profiler.step(self.step + 1):
                yield pack_conversations(prompts, self.data.renderer, self.engine.policy.device)

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def save(self) -> None:
        """A checkpoint of the step that is done, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            self.files.save(self.step, self.engine)
            self.saved = self.step


def train_offline(run: OfflineRun) -> None:
    """Draw, pack, update, until the steps are done or the user interrupts."""
    trainer, optim = run.config.trainer, run.config.actor_rollout_ref.actor.optim
    for batch in run.batches():
        step = run.step + 1
        watched = run.watchdog.watching(step, "update")
        with watched, span("update", step=step), run.profiler.part("update actor"):
            lr = rate(optim, step=run.step, total_steps=run.total_steps)
            done = run.engine.update(batch, lr=lr)
        run.step += 1
        metrics = {
            **done.metrics,
            "actor/grad_norm": done.stepped.grad_norm,
            "actor/lr": lr,
            "sft/tokens": float(batch.layout.mask.sum()),
            **SPANS.drain(run.step),
        }
        if run.is_due(trainer.test_freq) and run.data.validation is not None:
            metrics["sft/val_nll"] = validation_nll(run)
        run.last_nll = metrics["sft/nll"]
        run.first_nll = run.last_nll if run.first_nll is None else run.first_nll
        run.files.metrics(run.step, metrics)
        if run.is_due(trainer.save_freq):
            run.save()
    run.save()


def pack_conversations(
    prompts: list[Prompt], renderer: Renderer, device: torch.device | str = "cpu"
) -> PackedBatch:
    """Conversations as packed tokens; what the assistant says is learned, nothing else."""
    rendered: list[Rendered] = []
    for prompt in prompts:
        rendered += renderer.conversation(prompt.messages, prompt.tools)
    batch = pack(
        [r.tokens for r in rendered],
        masks=[[source == Source.SAMPLED for source in r.sources] for r in rendered],
        groups=list(range(len(rendered))),
        device=device,
    )
    if not bool(batch.layout.mask.any()):
        why = f"no token of these {len(prompts)} conversations was written by the assistant"
        raise UserError("data.train_files", prompts[0].data_source, why, "add assistant messages")
    return batch


@torch.no_grad()
def validation_nll(run: OfflineRun) -> float:
    """Mean negative log-likelihood of the assistant's tokens on the validation rows."""
    assert run.data.validation is not None
    prompts = list(run.data.validation.prompts)
    batch = pack_conversations(prompts, run.data.renderer, run.engine.policy.device)
    total = 0.0
    for indices in run.engine.passes.of(batch.lengths):
        part = batch.take(indices)
        scored = run.engine.policy(part.tokens, part.lengths, part.layout.mask)
        total -= float(scored.logp.double().sum())
    return total / int(batch.layout.mask.sum())
