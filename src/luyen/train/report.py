"""The numbers of a step, written down and shown; what looks broken is said at once."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from statistics import fmean
from typing import final

from luyen.algorithms.group_metrics import kl_drift
from luyen.base.bars import reaches
from luyen.base.errors import UserError
from luyen.base.records import Rollout, StopReason
from luyen.data.samplers import AdaptiveSampler
from luyen.engine.batch import PackedBatch
from luyen.rewards.metrics import score_metrics
from luyen.rollout.single_turn import Group
from luyen.runtime.roles import Described
from luyen.telemetry.spans import SPANS
from luyen.telemetry.streams import stream_bytes
from luyen.train.credit import Credited
from luyen.train.digests import drawn_stages, learned_stages
from luyen.train.parity import note_parity
from luyen.train.recorder import advantages_by_rollout
from luyen.train.role_metrics import role_metrics
from luyen.train.run import OnlineRun
from luyen.train.samples import in_order
from luyen.train.staleness import staleness_metrics
from luyen.train.turn_metrics import turn_metrics

_PATIENCE = 10
"""First steps without any difference inside a group before the run is called hopeless."""


@final
class Told:
    """What can be told of a step before it is learned from; each part is made once."""

    def __init__(self, run: OnlineRun, groups: list[Group], credited: Credited) -> None:
        self._run = run
        self._credited = credited
        self._groups = groups

    def prepare(self) -> None:
        """Make everything now, which takes a while and no role."""
        _ = self.stages, self.metrics

    @cached_property
    def everyone(self) -> Sequence[Rollout]:
        """Every rollout of the step, also those that nobody could judge; their tokens are sound."""
        run = self._run
        compared = run.roles.generation.compared
        return [compared(r, group.prompt) for group in run.judged for r in group.rollouts] + (
            run.broken
        )

    @cached_property
    def rollouts(self) -> Sequence[Rollout]:
        """Those that are learned from, in the order of the batch."""
        known = {rollout.key: rollout for rollout in self.everyone}
        return [known[rollout.key] for rollout in in_order(self._groups)]

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Digests of what was drawn, judged and credited."""
        journal = self._run.journal
        return drawn_stages(
            rollouts=self.everyone,
            baselines=self._run.baselines,
            batch=self._credited.batch,
            pack=journal.pack if journal is not None else stream_bytes,
        )

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """Scores, lengths and ages."""
        run = self._run
        is_multi_turn = run.roles.generation.conversations is not None
        return {
            **(score_metrics(run.judged) if run.needs.reward else {}),
            **turn_metrics(self.everyone, is_multi_turn=is_multi_turn),
            **_lengths(self.rollouts),
            **_staleness(run, self.rollouts),
            **self._credited.metrics,
        }


def finish_step(
    run: OnlineRun, credited: Credited, metrics: Mapping[str, float], told: Told, held: Described
) -> None:
    """Write metrics and rollouts of the step, move the controllers, and count it as done.

    `metrics` are those of the update, and `held` is what the roles hold after it.
    """
    rollouts = told.rollouts
    with run.phase("digest"):
        run.stages = {**told.stages, **learned_stages(metrics, held)}
    run.origin = run.chain, run.stages["weights"]
    note_parity(run, rollouts, credited.batch)
    if credited.kl is not None:
        run.follow_kl(credited.kl, len(rollouts))
        drift = kl_drift(run.kl_history)
        run.notes["actor/ref_kl_slope"] = drift.slope
    found = {
        **told.metrics,
        **run.reward.take_counts(),
        **metrics,
        **run.notes,
        **_times(run, credited.batch),
    }
    if run.needs.reward:
        _follow_success(run)
    run.reward.advance(run.judged)
    run.step += 1
    run.version += 1
    run.metrics |= found
    used = partial(advantages_by_rollout, rollouts, credited.batch)
    run.recorder.rollouts(run.step, told.everyone, used, run.baselines)
    _refuse_a_hopeless_start(run, found)


def _follow_success(run: OnlineRun) -> None:
    """Let an adaptive sampler see which share of the step's rollouts reached reward 1."""
    values = [score.value for group in run.judged for score in group.scores]
    share = fmean(value is not None and reaches(value, 1.0) for value in values)
    if isinstance(run.data.sampler, AdaptiveSampler):
        run.data.sampler.record(run.asking.cursor, share)


def _staleness(run: OnlineRun, rollouts: Sequence[Rollout]) -> dict[str, float]:
    is_ahead = run.config.trainer.max_staleness > 0
    return staleness_metrics(rollouts, run.version) if is_ahead else {}


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.response_length for rollout in rollouts]
    cut = [rollout.stop == StopReason.TOKEN_BUDGET for rollout in rollouts]
    return {
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "response_length/cut_fraction": fmean(cut),
        "prompt_length/mean": fmean(rollout.prompt_length for rollout in rollouts),
    }


def _times(run: OnlineRun, batch: PackedBatch) -> dict[str, float]:
    times = SPANS.drain(run.step + 1)
    total = sum(times.values())
    tokens = sum(batch.lengths)
    return {
        **times,
        "time/step": total,
        "time/tokens_per_s": tokens / total if total else 0.0,
        **role_metrics(run.roles.watch, times),
    }


def _refuse_a_hopeless_start(run: OnlineRun, found: Mapping[str, float]) -> None:
    """Stop when no group has ever differed: there is nothing to learn from."""
    share = found.get("group/zero_std_fraction")
    if share is None or not run.credit_rules.is_group_relative:
        return
    is_flat = share == 1.0 and run.flat_steps == run.step - 1
    run.flat_steps = run.step if is_flat else -1
    if run.flat_steps == _PATIENCE and found["reward/max"] == found["reward/min"]:
        raise UserError(
            "reward",
            found["reward/mean"],
            f"every rollout of the first {_PATIENCE} steps got the same reward, so that every "
            "advantage is 0",
            "look at rollouts/ in the run directory: is the reward reading the right text, are "
            "answers cut by max_response_length, is the task too hard or already solved?",
        )
