"""Metrics of a step: scores, lengths, turns, staleness, sampler-trainer parity, roles, times."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.advantages.grouping import kl_drift
from luyen.algorithms.parity import GapInputs, GapParts, largest_part, part_metrics, split_gap
from luyen.base.digests import page_with_checksum
from luyen.base.errors import UserError
from luyen.base.files import write_whole, writing
from luyen.base.records import Branch, CallStatus, Rollout, StopReason, ToolCall, reaches
from luyen.data.samplers import AdaptiveSampler
from luyen.engine.batch import PackedBatch
from luyen.rewards.metrics import score_metrics
from luyen.rewards.scoring import ScoredGroup
from luyen.runtime.roles import WeightDigests
from luyen.telemetry.metrics import metric
from luyen.telemetry.rollout_codec import stream_bytes
from luyen.telemetry.rollout_tables import TRAIN_TABLE, rollout_table
from luyen.telemetry.spans import SPANS
from luyen.train.advantages import BatchAdvantages
from luyen.train.batch import batch_order
from luyen.train.monitor import role_metrics
from luyen.train.record import (
    advantages_by_rollout,
    rollout_stages,
    stream_by_rollout,
    update_stages,
)
from luyen.train.run import OnlineRun
from luyen.train.scoring import ScoredRollouts
from luyen.train.state import RunProgress
from luyen.train.update import UpdateOutcome

# Sampler-trainer parity: parts of the log-prob gap, and the tokens where it is largest.

SCHEMA = 1
"""Version of the files."""
WORST = 10
"""Number of worst tokens recorded per step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token whose log-prob differs between sampler and trainer.

    Example:
        >>> WorstToken(rollout="3.0.a/1", branch=0, position=7, token=5, text="4", version=2,
        ...            trainer=-0.5, sampler=-0.25, kept_mass=None, part="engine").gap
        -0.25
    """

    rollout: str
    """Group and sample."""
    branch: int
    """Index of its branch; 0 unless a template rewrote the conversation."""
    position: int
    """Index in the branch, the prompt included."""
    token: int
    """Its id."""
    text: str
    """The token as text."""
    version: int | None
    """Version of the weights that sampled it; None: it was not sampled, so the mask is wrong."""
    trainer: float
    """The trainer's log-probability."""
    sampler: float
    """The sampler's."""
    kept_mass: float | None
    """Probability mass that top-k, top-p and min-p kept; None: they are off."""
    part: str
    """The part with the largest share in the gap."""

    @property
    def gap(self) -> float:
        """Trainer minus sampler."""
        return self.trainer - self.sampler

    def as_json(self) -> dict[str, Any]:
        """JSON of the record, with the gap."""
        return {**asdict(self), "gap": self.gap}


def record_parity(
    run: OnlineRun, rollouts: Sequence[Rollout], batch: PackedBatch, trainer_logp: Tensor | None
) -> dict[str, float]:
    """Parity metrics of the step in progress; where there is a gap, its worst tokens are written.

    `rollouts` are those of the batch, in batch order, and `trainer_logp` what the update measured.
    Empty in bypass mode and during `critic_warmup`, where the trainer's log-probs are not measured.
    """
    is_computed = run.rules.needs.old_logp == "compute"
    logp = batch.streams["old_logp"] if is_computed else trainer_logp
    if logp is None:
        return {}
    inputs = gap_inputs(rollouts, batch, logp, version=run.version)
    parts = split_gap(inputs)
    tokenizer = run.roles.generation.renderer.tokenizer
    worst = worst_tokens(
        rollouts,
        batch.layout.mask.nonzero()[:, 0],
        inputs,
        parts,
        text_of=lambda token: tokenizer.decode([token], skip_special=False),
    )
    if worst:
        page = {"schema": SCHEMA, "step": run.step + 1, "tokens": [t.as_json() for t in worst]}
        path = run.recorder.directory.parity(run.step + 1)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, page_with_checksum(page))
    return part_metrics(parts)


def gap_inputs(
    rollouts: Sequence[Rollout], batch: PackedBatch, logp: Tensor, *, version: int
) -> GapInputs:
    """Inputs of the gap split for the sampled tokens; `version` is the current one."""
    # A rollout has the streams of its last branch; `branches` would copy them.
    mask, rows = batch.layout.mask, [(r, part) for r in rollouts for part in (*r.earlier, r)]
    sampled = batch.streams.get("sampled_logp")
    is_old = any(v not in (None, version) for _, branch in rows for v in set(branch.versions))
    has_drift = any(_is_drifted(rollout) for rollout in rollouts)
    has_kept = any(branch.kept_mass for _, branch in rows)
    none = torch.zeros(int(mask.sum()), dtype=torch.bool, device=mask.device)

    def of_tokens(value: Callable[[Rollout, Branch | Rollout, int], Any]) -> Tensor:
        found = [value(r, branch, i) for r, branch in rows for i in range(len(branch.tokens))]
        assert len(found) == len(mask), "the batch holds other rollouts than these"
        return torch.tensor(found, device=mask.device)[mask]

    return GapInputs(
        logp=logp[mask],
        rollout_logp=batch.streams["rollout_logp"][mask],
        is_stale=of_tokens(lambda _, b, i: b.versions[i] != version) if is_old else none,
        is_drifted=of_tokens(lambda r, _b, _i: _is_drifted(r)) if has_drift else None,
        sampled_logp=None if sampled is None else sampled[mask],
        log_kept=of_tokens(lambda _, b, i: _log_kept(b, i)) if has_kept else None,
    )


def worst_tokens(
    rollouts: Sequence[Rollout],
    places: Tensor,
    inputs: GapInputs,
    parts: GapParts,
    *,
    text_of: Callable[[int], str],
) -> list[WorstToken]:
    """The tokens with the largest gaps, largest first; tokens without a gap are left out.

    `places` are the batch positions of the tokens of `inputs`. The gap excludes the mass removed
    by top-k, top-p and min-p, which `kept_mass` reports.
    """
    gap = (inputs.logp - inputs.rollout_logp).abs()
    sizes, order = gap.topk(min(WORST, len(gap)))
    chosen = [i for size, i in zip(sizes.tolist(), order.tolist(), strict=True) if size != 0]
    if not chosen:
        return []
    rows = [(r, k, branch) for r in rollouts for k, branch in enumerate(r.branches)]
    ends = list(accumulate(len(branch.tokens) for _, _, branch in rows))
    found: list[WorstToken] = []
    for index in chosen:
        place = int(places[index])
        row = bisect_right(ends, place)
        rollout, number, branch = rows[row]
        position = place - (ends[row - 1] if row else 0)
        found.append(
            WorstToken(
                rollout=f"{rollout.group}/{rollout.sample}",
                branch=number,
                position=position,
                token=branch.tokens[position],
                text=text_of(branch.tokens[position]),
                version=branch.versions[position],
                trainer=float(inputs.logp[index]),
                sampler=float(inputs.rollout_logp[index]),
                kept_mass=branch.kept_mass[position] if branch.kept_mass else None,
                part=largest_part(parts, index),
            )
        )
    return found


def _is_drifted(rollout: Rollout) -> bool:
    return rollout.notes.get("drift", 0.0) > 0


def _log_kept(branch: Branch | Rollout, position: int) -> float:
    mass = branch.kept_mass[position] if branch.kept_mass else None
    # A sum of probabilities may exceed 1 by a rounding.
    return 0.0 if mass is None else math.log(min(mass, 1.0))


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many versions behind rollouts are, by their oldest token."""
    versions_used = [
        {v for branch in rollout.branches for v in set(branch.versions) if v is not None}
        for rollout in rollouts
    ]
    behind = [version - min(versions) for versions in versions_used if versions]
    if not behind:
        return {}
    return {
        "async/staleness_mean": fmean(behind),
        "async/staleness_max": float(max(behind)),
        "async/mixed_fraction": fmean(len(versions) > 1 for versions in versions_used),
    }


# Multi-turn metrics: turns, tool calls, stop reasons, re-tokenisation checks.

_TURNS = {
    "mean": "Mean number of turns of the policy.",
    "max": "Largest number of turns of the policy.",
    "faults": "Conversations that failed and are not trained on.",
    "retries": "Times that a conversation was played again because it broke.",
    "unreleased": "Tools that failed to let go of what a conversation had opened.",
    "splits": "Times that a chat template rewrote what was said, so that a new sample began.",
    "drift": "Conversations whose template text differs from a full re-render.",
    "sampled_differs": "Turns that the template would write differently than the policy did.",
    "retokenised": "Turns whose text would be cut into other tokens than were sampled.",
}
_TOOLS = {
    "call_fraction": "Share of the conversations in which a tool is called.",
    "calls_mean": "Mean number of calls in a conversation.",
    "valid_fraction": "Share of the calls that name a tool and fit its schema.",
    "success_fraction": "Share of the calls made that the tool answered.",
    "error_fraction": "Share of the calls that the policy wrote that got no answer of a tool.",
}
for _family, _names in {"turns": _TURNS, "tools": _TOOLS}.items():
    for _name, _doc in _names.items():
        metric(f"{_family}/{_name}", doc=_doc)
metric("time/conversation_mean", unit="s", doc="Mean duration of a conversation.")
metric("time/conversation_max", unit="s", doc="Longest duration of a conversation.")
metric("time/tool_call_mean", unit="s", doc="Mean duration of a tool call.")
metric("turns/stop/<reason>", doc="Share of the conversations that ended for this reason.")
metric("tools/<status>_calls", doc="Calls of the step that ended this way.")
metric("tools/<tool>/calls", doc="Calls of one tool in the step.")
metric(
    "tools/<tool>/<number...>", doc="What a tool measured in a conversation, the mean over them."
)

_COUNTED = ("retries", "unreleased", "splits", "drift", "sampled_differs", "retokenised")


def turn_metrics(rollouts: Sequence[Rollout], *, is_multi_turn: bool) -> dict[str, float]:
    """Metrics of conversations; empty for single-turn rollouts."""
    if not is_multi_turn or not rollouts:
        return {}
    turns = [float(rollout.num_turns) for rollout in rollouts]
    seconds = [rollout.notes.get("seconds", 0.0) for rollout in rollouts]
    found = {
        "turns/mean": fmean(turns),
        "turns/max": max(turns),
        "time/conversation_mean": fmean(seconds),
        "time/conversation_max": max(seconds),
        "turns/faults": float(sum(rollout.fault is not None for rollout in rollouts)),
    }
    for name in _COUNTED:
        found[f"turns/{name}"] = sum(rollout.notes.get(name, 0.0) for rollout in rollouts)
    for reason in StopReason:
        share = fmean(rollout.stop == reason for rollout in rollouts)
        found[f"turns/stop/{reason.value.replace(' ', '_')}"] = share
    calls = [call for rollout in rollouts for call in rollout.calls]
    called = fmean(any(call.has_run for call in rollout.calls) for rollout in rollouts)
    found |= {"tools/call_fraction": called} | _call_metrics(calls, len(rollouts))
    return _tool_numbers(rollouts) | found


def _tool_numbers(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of the numbers that tools report, over conversations that have them."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.notes.items():
            if name.startswith("tools/"):
                values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _call_metrics(calls: Sequence[ToolCall], rollouts: int) -> dict[str, float]:
    ran = [call for call in calls if call.has_run]
    found = {"tools/calls_mean": len(calls) / rollouts}
    if calls:
        found["tools/valid_fraction"] = fmean(call.is_valid for call in calls)
        found["tools/error_fraction"] = fmean(call.status != CallStatus.OK for call in calls)
    if ran:
        found["tools/success_fraction"] = fmean(call.status == CallStatus.OK for call in ran)
        found["time/tool_call_mean"] = fmean(call.seconds for call in ran)
    for status in CallStatus:
        count = sum(call.status == status for call in calls)
        found[f"tools/{status.value.replace(' ', '_')}_calls"] = float(count)
    for name in sorted({call.name for call in ran}):
        found[f"tools/{name}/calls"] = float(sum(call.name == name for call in ran))
    return found


_MAX_FLAT_STEPS = 10
"""Number of first steps without any reward difference in a group after which a run stops."""


@final
class StepReport:
    """Metrics and digests of a step that do not depend on its update; each is computed once."""

    def __init__(
        self, run: OnlineRun, step_rollouts: ScoredRollouts, advantages: BatchAdvantages
    ) -> None:
        self._run = run
        self.step_rollouts = step_rollouts
        """The rollouts of the step with their scores."""
        self.advantages = advantages
        """The batch with its advantages."""

    def prepare(self) -> None:
        """Compute everything now, while workers update."""
        _ = self.stages, self.metrics

    @cached_property
    def all_rollouts(self) -> Sequence[Rollout]:
        """Every rollout of the step, failed ones included, with its re-tokenisation check done."""
        compared, found = self._run.roles.generation.compared, self.step_rollouts
        scored = [compared(r, group.prompt) for group in found.scored for r in group.rollouts]
        return [*scored, *found.broken]

    @cached_property
    def rollouts(self) -> Sequence[Rollout]:
        """The rollouts that are trained on, in batch order."""
        by_key = {rollout.key: rollout for rollout in self.all_rollouts}
        return [by_key[rollout.key] for rollout in batch_order(self.step_rollouts.groups)]

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Digests of prompts, rollouts, rewards and advantages."""
        journal = self._run.journal
        return rollout_stages(
            rollouts=self.all_rollouts,
            baselines=self.step_rollouts.baselines,
            batch=self.advantages.batch,
            pack=journal.pack if journal is not None else stream_bytes,
        )

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of scores, turns, lengths, staleness and advantages."""
        run = self._run
        is_multi_turn = run.roles.generation.conversations is not None
        return {
            **(score_metrics(self.step_rollouts.scored) if run.rules.needs.reward else {}),
            **turn_metrics(self.all_rollouts, is_multi_turn=is_multi_turn),
            **_lengths(self.rollouts),
            **_staleness(run, self.rollouts),
            **self.advantages.metrics,
            **run.data.shares(group.prompt.uid for group in self.step_rollouts.scored),
        }


def finish_step(
    run: OnlineRun,
    report: StepReport,
    updated: UpdateOutcome,
    parity: Mapping[str, float],
    digests: WeightDigests,
) -> RunProgress:
    """Record the rollouts of the step, let reward and sampler follow it; the progress after it.

    `parity` are metrics of the batch before the update, `digests` those of the weights after it.
    """
    rollouts, scored = report.rollouts, report.step_rollouts.scored
    batch, measured = report.advantages.batch, {**parity, **updated.metrics}
    with run.phase("digest"):
        stages = {**report.stages, **update_stages(measured, digests)}
    gap = record_parity(run, rollouts, batch, updated.trainer_logp)
    progress, drift = _follow_kl(run.progress, report)
    found = {
        **report.metrics,
        **run.reward.take_counts(),
        **measured,
        **report.step_rollouts.metrics,
        **gap,
        **drift,
        **_times(run, batch),
    }
    if run.rules.needs.reward:
        _update_sampler(run, scored)
    run.reward.advance(scored)
    step = progress.step + 1
    _record_rollouts(run, step, report, updated.trainer_logp)
    return replace(
        progress,
        step=step,
        version=progress.version + 1,
        skipped=updated.skipped,
        entropy_controller=updated.entropy_controller,
        flat_steps=_flat_steps(run, step, found),
        origin=(run.chain, stages["weights"]),
        metrics=found,
        stages=stages,
    )


def _follow_kl(progress: RunProgress, report: StepReport) -> tuple[RunProgress, dict[str, float]]:
    """KL coefficient and history after the step, and the slope of the history."""
    kl = report.advantages.kl
    if kl is None:
        return progress, {}
    progress = progress.with_kl(kl, len(report.rollouts))
    return progress, {"actor/ref_kl_slope": kl_drift(progress.kl_history).slope}


def _record_rollouts(
    run: OnlineRun, step: int, report: StepReport, trainer_logp: Tensor | None
) -> None:
    rollouts, batch = report.rollouts, report.advantages.batch
    used = partial(advantages_by_rollout, rollouts, batch)
    is_computed = run.rules.needs.old_logp == "compute"
    logp = batch.streams["old_logp"] if is_computed else trainer_logp
    measured = dict if logp is None else partial(stream_by_rollout, rollouts, batch, logp)
    baselines = report.step_rollouts.baselines
    run.recorder.rollouts(step, report.all_rollouts, used, baselines, measured)
    if not run.recorder.log.shows_rollouts:
        return
    most = run.config.trainer.log_train_generations
    decode = partial(run.data.renderer.tokenizer.decode, skip_special=False)
    table = rollout_table(TRAIN_TABLE, step, report.all_rollouts, most=most, decode=decode)
    run.recorder.log.rollouts(table)


def _update_sampler(run: OnlineRun, scored: Sequence[ScoredGroup]) -> None:
    """Report the share of rollouts with reward 1 to an adaptive sampler."""
    values = [score.value for group in scored for score in group.scores]
    share = fmean(value is not None and reaches(value, 1.0) for value in values)
    if isinstance(run.data.sampler, AdaptiveSampler):
        run.data.sampler.record(run.submitter.cursor, share)


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


def _flat_steps(run: OnlineRun, step: int, found: Mapping[str, float]) -> int:
    """Number of first steps whose groups have equal rewards; -1 after one where they differ.

    A UserError when every rollout of these steps has the same reward.
    """
    share, before = found.get("group/zero_std_fraction"), run.progress.flat_steps
    if share is None or not run.rules.advantage_config.is_group_relative:
        return before
    flat_steps = step if share == 1.0 and before == step - 1 else -1
    if flat_steps == _MAX_FLAT_STEPS and found["reward/max"] == found["reward/min"]:
        raise UserError(
            "reward",
            found["reward/mean"],
            f"every rollout of the first {_MAX_FLAT_STEPS} steps got the same reward, so that "
            "every advantage is 0",
            "look at rollouts/ in the run directory: is the reward reading the right text, are "
            "answers cut by max_response_length, is the task too hard or already solved?",
        )
    return flat_steps
