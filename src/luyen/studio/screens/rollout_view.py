"""One rollout with every token, its group, and why an advantage is 0."""

import math
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Score, Source
from luyen.base.secrets import masked
from luyen.studio.doctor.vocabulary import TokenText
from luyen.studio.screens.folder import KnownRun, Refusal, token_file
from luyen.studio.screens.rollout_index import RolloutIndex
from luyen.studio.screens.rollout_query import previews, rows_of_group
from luyen.studio.token_file import TokenNumbers, read_token_numbers
from luyen.telemetry.rollout_files import RecordedRollout, StoredRollout, read_rollout_at

_ROLES = {
    Source.PROMPT: "prompt",
    Source.SAMPLED: "assistant",
    Source.TOOL: "tool",
    Source.TEMPLATE: "template",
}
_MOST_TOKENS = 200_000
_SIBLING = ("index", "reward", "advantage", "tokens")
_NO_TRAINER = "the file has no log-probabilities of the trainer: "
MISSING = {
    "validation": f"{_NO_TRAINER}nothing is trained on a validation",
    "old": f"{_NO_TRAINER}it was written by an older version; a replay of the step computes them",
    "unused": f"{_NO_TRAINER}the step did not train on the rollout",
    "bypass": f"{_NO_TRAINER}the algorithm takes those of the sampler; a replay of the step "
    "computes them",
    "entropy": "entropies are recorded as a mean of the step only (actor/entropy); a replay of the "
    "step computes them",
    "advantage": "the step did not train on the rollout",
}


def rollout_page(
    known: KnownRun,
    index: RolloutIndex,
    *,
    split: str,
    step: int,
    row: int,
    text: TokenText,
    folder: Path,
) -> dict[str, Any]:
    """Everything of one rollout; `folder` is that of the runs."""
    stored = _stored(index, step, row)
    recorded, rollout = stored.recorded, stored.recorded.rollout
    replayed = _replayed(rollout, token_file(folder, known, step)) if split == "train" else None
    [shown] = previews(index, [(step, row)], split=split, text=text)
    group = group_page(index, split=split, step=step, group=str(rollout.group), text=text)
    mine = {"index": row, "reward": shown["reward"], "advantage": _own_advantage(recorded)}
    return {
        **shown,
        "answer": rollout.text,
        "fault": rollout.fault,
        "sample": rollout.sample,
        "messages": messages_of(rollout, rollout.calls, text),
        "earlier": [messages_of(branch, (), text) for branch in rollout.earlier],
        "tokens": _streams(stored, replayed and replayed[0], text),
        "replayed": replayed and {"is_equal": replayed[1]},
        "reward_tree": None if rollout.score is None else score_json(rollout.score),
        "tool_calls": [_call(call) for call in rollout.calls],
        "given": [{"turn": turn, "value": value} for turn, value in rollout.given],
        "notes": dict(rollout.notes),
        "baseline": recorded.baseline,
        "ground_truth": None,
        "data_source": None,
        "siblings": [{n: one[n] for n in _SIBLING} for one in group["rows"]],
        "advantage_reason": why_zero(mine, group["rows"], is_used=recorded.advantages is not None,
                                     fault=rollout.fault, split=split),
        "missing": {} if replayed else _missing(stored, split),
        "commands": _commands(known, step, f"{rollout.group}/{rollout.sample}"),
    }  # fmt: skip


def _replayed(rollout: Rollout, file: Path) -> tuple[TokenNumbers, bool] | None:
    return read_token_numbers(
        file, group=str(rollout.group), sample=rollout.sample, tokens=rollout.tokens
    )


def _commands(known: KnownRun, step: int, name: str) -> dict[str, str]:
    """Commands about the rollout of a name, to copy."""
    place = shlex.quote(str(known.directory.root))
    return {
        "replay": f"luyen replay {place} --step {step}",
        "regenerate": f"luyen replay {place} --step {step} --rollout {shlex.quote(name)}",
        "rescore": f"luyen rescore {place} --steps {step}",
    }


def _stored(index: RolloutIndex, step: int, row: int) -> StoredRollout:
    if step not in index.steps:
        raise Refusal(404, f"there are no rollouts of step {step}", field="step")
    if index.path(step).is_symlink():
        raise Refusal(
            409, f"the rollouts of step {step} are a link, which is not followed", field="step"
        )
    try:
        return read_rollout_at(index.path(step), row)
    except IndexError:
        raise Refusal(404, f"step {step} has no rollout {row}", field="index") from None
    except UserError as error:
        raise Refusal(409, error.why, field=error.field, fix=error.fix) from None


def _own_advantage(recorded: RecordedRollout) -> float | None:
    known = [value for value in recorded.advantages or () if value is not None]
    return sum(known) / len(known) if known else None


def _streams(
    stored: StoredRollout, replayed: TokenNumbers | None, text: TokenText
) -> dict[str, Any]:
    rollout = stored.recorded.rollout
    count = min(len(rollout.tokens), _MOST_TOKENS)
    logps = rollout.logps[:count]
    trainer, entropy = stored.trainer_logps, None
    if replayed is not None:
        trainer, entropy = trainer or replayed.trainer_logps, list(replayed.entropy[:count])
    trainer = None if trainer is None else trainer[:count]
    ratio = None
    if trainer is not None:
        pairs = zip(trainer, logps, strict=True)
        ratio = [None if a is None or b is None else _exp(a - b) for a, b in pairs]
    advantages = stored.recorded.advantages
    return {
        "id": list(rollout.tokens[:count]),
        "text": [text(token) for token in rollout.tokens[:count]],
        "mask": [int(source == Source.SAMPLED) for source in rollout.sources[:count]],
        "source": [int(source) for source in rollout.sources[:count]],
        "turn": list(rollout.turns[:count]),
        "sampler_logprob": list(logps),
        "trainer_logprob": None if trainer is None else list(trainer),
        "ratio": ratio,
        "advantage": None if advantages is None else list(advantages[:count]),
        "entropy": entropy,
        "kept_mass": list(rollout.kept_mass[:count]) or None,
        "version": list(rollout.versions[:count]),
        "left_out": len(rollout.tokens) - count,
    }


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:
        return None


def _missing(stored: StoredRollout, split: str) -> dict[str, str]:
    found = {"entropy": MISSING["entropy"]}
    if stored.recorded.advantages is None:
        found["advantage"] = MISSING["advantage"]
    if stored.trainer_logps is None:
        kind = "unused" if stored.recorded.advantages is None else "bypass"
        kind = kind if stored.has_trainer_column else "old"
        kind = "validation" if split == "validation" else kind
        found["trainer_logprob"] = found["ratio"] = MISSING[kind]
    return found


def messages_of(branch: Any, calls: Sequence[Any], text: TokenText) -> list[dict[str, Any]]:
    """The conversation as stretches of tokens of one source and turn, with their range."""
    kinds = zip(branch.sources, branch.turns, strict=True)
    found: list[dict[str, Any]] = []
    start = 0
    for (source, turn), stretch in groupby(kinds):
        end = start + len(list(stretch))
        mine = (
            [_call(call) for call in calls if call.turn == turn] if source == Source.SAMPLED else []
        )
        found.append(
            {
                "role": _ROLES[source],
                "content": "".join(text(token) for token in branch.tokens[start:end]),
                "tool_calls": mine,
                "start": start,
                "end": end,
                "turn": turn,
                "loss": source == Source.SAMPLED,
            }
        )
        start = end
    return found


def _call(call: Any) -> dict[str, Any]:
    return {
        "name": call.name,
        "arguments": dict(call.arguments),
        "result": call.result,
        "status": call.status.value,
        "seconds": call.seconds,
        "error": call.error,
        "turn": call.turn,
        "attempts": call.attempts,
    }


def score_json(score: Score) -> dict[str, Any]:
    """A score with its parts."""
    detail = [f"judged {score.raw:g}"] if score.raw is not None else []
    detail += ["gated"] if score.gated else []
    detail += [f"{score.seconds:.3g} s"] if score.seconds is not None else []
    return {
        "name": score.name,
        "score": score.value,
        "weight": score.weight,
        "combine": score.combine,
        "detail": ", ".join(detail) or None,
        "fault": None if score.error is None else masked(score.error),
        "reply": score.reply,
        "children": [score_json(part) for part in score.parts],
    }


def group_page(
    index: RolloutIndex, *, split: str, step: int, group: str, text: TokenText
) -> dict[str, Any]:
    """The rollouts of a group, and why it teaches nothing where it does not."""
    places = rows_of_group(index, step, group)
    if not places:
        raise Refusal(404, f"step {step} has no group {group[:100]!r}", field="group")
    rows = previews(index, [(step, row) for row in places], split=split, text=text, is_whole=True)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None
    if mean is not None:
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return {"rows": rows, "reason": group_reason(rows, split), "mean": mean, "std": spread}


def group_reason(rows: Sequence[dict[str, Any]], split: str) -> str | None:
    """Why no rollout of a group has an advantage; None where one has."""
    if split == "validation":
        return "Nothing is trained on a validation."
    if any(row["advantage"] for row in rows):
        return None
    rewards = {row["reward"] for row in rows if row["reward"] is not None}
    if rewards and len(rewards) == 1 and len(rows) > 1:
        [reward] = rewards
        return (
            f"All {len(rows)} rollouts got the reward {reward:g}, so none is better than "
            "another and every advantage is 0."
        )
    if all(row["advantage"] is None for row in rows):
        faults = sum(row["fault"] is not None for row in rows)
        if faults:
            return f"{faults} of {len(rows)} rollouts failed, and the step left the group out."
        return "The step left the group out (algorithm.filter_groups, or the fault policy)."
    return None


def why_zero(
    mine: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    is_used: bool,
    fault: str | None,
    split: str,
) -> str | None:
    """Why the advantage of a rollout is 0 or missing; None where it has one."""
    if mine["advantage"]:
        return None
    whole = group_reason(rows, split)
    if whole is not None:
        return whole
    if not is_used:
        if fault is not None:
            return "The rollout failed, and the step left it out."
        return "The step left the rollout out (algorithm.filter_groups, or the fault policy)."
    return "Its reward equals the baseline of its group, so it is neither better nor worse."
