"""Rules about the update: learning rate, gradients, clipping, KL, entropy, critic."""

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from luyen.studio.doctor.findings import (
    Symptom,
    less_clipping,
    more_exploration,
    repair,
    rule,
    slower_critic,
    smaller_updates,
)
from luyen.studio.doctor.record import WINDOW, RunRecord, solved_groups
from luyen.telemetry.metrics import CLOCK

_IDLE = 3
"""Steps in a row without a learning rate: a schedule may end at 0, not stay there."""
_SKIPPED = 2
"""Skipped updates: one is an accident, two are a habit."""
_CLIPPED = 0.3
"""Share of clipped tokens; healthy runs stay below a fifth, and past a third the update is made of
what is left over."""
_FAR = 1.0
"""KL to the reference in nats a token that counts as a runaway."""
_LEAP = 0.1
"""KL of one update in nats a token, ten times what trust regions aim at."""
_COLLAPSED, _NEVER = 0.1, 0.05
"""Share of the first entropy, and nats a token, below which sampling hardly varies."""
_SOLVED = 0.5
"""Share of solved groups above which low entropy is expected."""
_SETTLED = 20
"""Steps before entropy is judged: the first ones still find the format."""
_BLOWN, _NATS = 2.0, 1.0
"""Factor over the first entropy, and nats above it, that count as a blow-up."""


@rule("not-finite", "error")
def not_finite(record: RunRecord) -> Iterator[Symptom]:
    """A metric is NaN or infinite."""
    where: dict[str, list[int]] = {}
    for line in record.lines:
        for name, value in line.values.items():
            if not math.isfinite(value) and not name.startswith((*CLOCK, "actor/lr", "critic/lr")):
                where.setdefault(name, []).append(line.step)
    if where:
        first = min(where, key=lambda name: (where[name][0], name))
        yield Symptom(
            says=f"{first} is not finite from step {where[first][0]} on"
            + (f", and so are {len(where) - 1} other metrics" if len(where) > 1 else ""),
            experiment=repair(
                f"look at rollouts and rewards of step {where[first][0]}, and go on from a "
                "checkpoint before it"
            ),
            steps=tuple(sorted({step for steps in where.values() for step in steps})),
            numbers={name: float(len(steps)) for name, steps in sorted(where.items())},
        )


@rule("learning-rate", "error", steps=_IDLE)
def learning_rate(record: RunRecord) -> Iterator[Symptom]:
    """The learning rate is 0 for several steps, or no number."""
    for role, key in (("actor", "actor_rollout_ref.actor"), ("critic", "critic")):
        idle: list[int] = []
        for line in record.steps:
            value = line.values.get(f"{role}/lr")
            if value is not None:
                idle = [*idle, line.step] if value == 0 or not math.isfinite(value) else []
        if len(idle) >= _IDLE:
            yield Symptom(
                says=f"{role}/lr has been 0 or no number since step {idle[0]}",
                experiment=repair(
                    f"look at {key}.optim: lr, lr_warmup_steps, min_lr_ratio and the number of "
                    "steps the schedule is made for"
                ),
                steps=tuple(idle),
                numbers={f"{role}/lr": record.steps[-1].values.get(f"{role}/lr", 0.0)},
            )


@rule("frozen-parameters", "error", steps=WINDOW)
def frozen_parameters(record: RunRecord) -> Iterator[Symptom]:
    """The weights do not move although there is something to learn."""
    norm, rate = record.series("actor/grad_norm"), record.series("actor/lr")
    # Without reward differences a zero gradient is correct; another rule reports that.
    flat = record.series("group/zero_std_fraction")
    differs = not flat.has_end or flat.end() < 1
    if norm.has_end and max(norm.values[-WINDOW:]) == 0 and differs:
        yield Symptom(
            says=f"actor/grad_norm is 0 in the last {WINDOW} steps while rewards differ",
            experiment=repair(
                "look which parameters require a gradient: model.target_modules, lora_rank, and "
                "plugins that change the model or the loss"
            ),
            steps=norm.last_steps,
            numbers={"actor/grad_norm": 0.0},
        )
    moving = any(value > 0 for value in rate.values)
    # A step whose gradient is zero, as it is where all rewards are alike, moves nothing.
    still = {step for step, value in zip(norm.steps, norm.values, strict=True) if value == 0}
    same = _same_weights(record, still) if moving else None
    if same is not None:
        yield Symptom(
            says=f"the checkpoints of steps {same[0]} and {same[1]} hold the same weights",
            experiment=repair("look whether the optimizer was given the parameters that train"),
            steps=same,
        )


def _same_weights(record: RunRecord, still: Collection[int]) -> tuple[int, int] | None:
    """Two neighbouring checkpoints whose policy has the same bytes, not all steps between still."""
    hashes = {step: _policy_hashes(page) for step, page in record.checkpoints.items()}
    steps = sorted(step for step, value in hashes.items() if value is not None)
    alike = [(a, b) for a, b in pairwise(steps) if hashes[a] == hashes[b]]
    pairs = [(a, b) for a, b in alike if any(n not in still for n in range(a + 1, b + 1))]
    return pairs[0] if pairs else None


def _policy_hashes(page: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Of the files that hold the policy's weights; None: the checkpoint lists none."""
    files: Mapping[str, Any] = page.get("files") or {}
    names = [n for n in sorted(files) if n == "actor.safetensors" or n.startswith("actor/")]
    return tuple(str(files[name].get("sha256")) for name in names) or None


@rule("skipped-updates", "warning")
def skipped_updates(record: RunRecord) -> Iterator[Symptom]:
    """Optimizer steps are left out because their gradient is not finite."""
    for role in ("actor", "critic"):
        skipped = record.series(f"{role}/skipped_updates")
        count = sum(skipped.values)
        if count >= _SKIPPED:
            pairs = zip(skipped.steps, skipped.values, strict=True)
            yield Symptom(
                says=f"{count:g} optimizer steps of the {role} were left out",
                experiment=smaller_updates(record),
                steps=tuple(step for step, value in pairs if value > 0),
                numbers={f"{role}/skipped_updates": count},
            )


@rule("clip-saturation", "warning", steps=WINDOW)
def clip_saturation(record: RunRecord) -> Iterator[Symptom]:
    """Most of the update is clipped away."""
    for name in ("actor/pg_clipfrac", "actor/cispo_clipfrac", "actor/dppo_masked_fraction"):
        clipped = record.series(name)
        if clipped.has_end and clipped.end() > _CLIPPED:
            yield Symptom(
                says=f"{clipped.end():.0%} of the tokens are clipped ({name}, median of the last "
                f"{WINDOW} steps)",
                experiment=less_clipping(record),
                steps=clipped.last_steps,
                numbers={name: clipped.end()},
            )


@rule("kl-runaway", "warning", steps=WINDOW)
def kl_runaway(record: RunRecord) -> Iterator[Symptom]:
    """The policy leaves the reference, or its own last version, behind."""
    far = record.series("actor/ref_kl")
    if far.has_both_ends and far.end() > max(_FAR, 2 * far.start()):
        yield Symptom(
            says=f"the KL to the reference is {far.end():.3g} nats a token, and was "
            f"{far.start():.3g} at the beginning",
            experiment=smaller_updates(record),
            steps=far.last_steps,
            numbers={"actor/ref_kl": far.end(), "actor/ref_kl at the beginning": far.start()},
        )
    leap = record.series("actor/ppo_kl")
    if leap.has_end and abs(leap.end()) > _LEAP:
        yield Symptom(
            says=f"one update moves the policy by {leap.end():.3g} nats a token",
            experiment=smaller_updates(record),
            steps=leap.last_steps,
            numbers={"actor/ppo_kl": leap.end()},
        )


@rule("entropy-collapse", "warning", steps=_SETTLED)
def entropy_collapse(record: RunRecord) -> Iterator[Symptom]:
    """The policy stopped exploring before the task is solved."""
    entropy = record.series("actor/entropy")
    if len(entropy) < _SETTLED or solved_groups(record).all_share >= _SOLVED:
        return
    if entropy.end() < min(_NEVER, _COLLAPSED * entropy.start()):
        yield Symptom(
            says=f"entropy is {entropy.end():.3g} nats a token, and was {entropy.start():.3g}",
            experiment=more_exploration(record),
            steps=entropy.last_steps,
            numbers={"actor/entropy": entropy.end(), "at the beginning": entropy.start()},
        )


@rule("entropy-blow-up", "warning", steps=2 * WINDOW)
def entropy_blow_up(record: RunRecord) -> Iterator[Symptom]:
    """The policy becomes noise."""
    entropy = record.series("actor/entropy")
    if not entropy.has_both_ends:
        return
    if entropy.end() > max(_BLOWN * entropy.start(), entropy.start() + _NATS):
        yield Symptom(
            says=f"entropy is {entropy.end():.3g} nats a token, and was {entropy.start():.3g}",
            experiment=smaller_updates(record),
            steps=entropy.last_steps,
            numbers={"actor/entropy": entropy.end(), "at the beginning": entropy.start()},
        )


# Rules about the critic.

_EXPLODED = 10.0
"""Factor over the smallest value loss so far."""
_WORSE = -0.1
"""Explained variance of a harmful critic; that of an untrained one is about 0."""
_MIN_CRITIC_STEPS = 20
"""Steps that a fresh value head may take to become better than a constant."""


@rule("value-loss-explosion", "warning", steps=2 * WINDOW)
def value_loss_explosion(record: RunRecord) -> Iterator[Symptom]:
    """The loss of the critic grows by an order of magnitude."""
    loss = record.series("critic/vf_loss")
    if not loss.has_both_ends:
        return
    values = loss.values[:-WINDOW]
    best = min(median(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1))
    if loss.end() > _EXPLODED * best:
        yield Symptom(
            says=f"critic/vf_loss is {loss.end():.3g}, and was {best:.3g} at its best",
            experiment=slower_critic(record),
            steps=loss.last_steps,
            numbers={"critic/vf_loss": loss.end(), "at its best": best},
        )


@rule("critic-worse-than-mean", "warning", steps=_MIN_CRITIC_STEPS)
def critic_worse_than_mean(record: RunRecord) -> Iterator[Symptom]:
    """The critic predicts returns worse than their mean would."""
    explained = record.series("critic/explained_variance")
    if len(explained) >= _MIN_CRITIC_STEPS and explained.end() < _WORSE:
        yield Symptom(
            says=f"critic/explained_variance is {explained.end():.3g} after {len(explained)} "
            "steps: advantages are noisier than without a critic",
            experiment=slower_critic(record),
            steps=explained.last_steps,
            numbers={"critic/explained_variance": explained.end()},
        )
