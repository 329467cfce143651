"""Rules about what the sampler draws: its agreement with the trainer, its weights, its lengths."""

from collections.abc import Iterator

from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.rollouts import name_of
from luyen.studio.doctor.tuning import repair, roomier, shorter

_MEAN_GAP = 0.02
"""Mean gap in nats a token: twice what bf16 kernels of two engines differ by."""
_WORST_GAP = 2.0
"""Gap of a single token at which its importance is wrong by a factor of seven."""
_CUT = 0.5
"""Share of answers that end at the budget: most rewards are those of half an answer."""
_LONGER, _TOKENS = 2.0, 4.0
"""Times the first length, and tokens above it, that are an explosion when the reward stays."""
_GAIN = 0.05
"""Rise of the reward, in its own spread, that a longer answer may cost something for."""


@rule("parity-gap", "warning", steps=WINDOW)
def parity_gap(record: RunRecord) -> Iterator[Symptom]:
    """Sampler and trainer disagree about the probability of the same tokens."""
    # Where rollouts are older than the weights, only tokens of the same version say anything.
    is_ahead = record.config.trainer.max_staleness > 0
    names = ("engine_mean", "engine_max") if is_ahead else ("mean_gap", "max_gap")
    measured = {name: record.course(f"parity/{name}") for name in names}
    mean, worst = measured.values()
    if not (mean.has_end or (is_ahead and len(mean))):
        return
    if mean.end() > _MEAN_GAP or (worst.has_end and worst.end() > _WORST_GAP):
        rollout = record.config.actor_rollout_ref.rollout
        change = "actor_rollout_ref.rollout.deterministic=true"
        if rollout.deterministic:
            change = "`luyen selftest` with this model: it says where the two part"
        shares = _shares(record)
        yield Symptom(
            says=f"log-probabilities differ by {mean.end():.3g} nats in the mean and "
            f"{worst.end():.3g} at worst{_where(record)}",
            experiment=repair(change),
            steps=mean.last_steps,
            numbers={**{f"parity/{n}": c.end() for n, c in measured.items()}, **shares},
            rollouts=tuple(dict.fromkeys(token["rollout"] for token in record.worst_tokens)),
        )


def _shares(record: RunRecord) -> dict[str, float]:
    """What the gap is made of, where the run says so."""
    courses = {
        name: record.course(f"parity/{name}_share") for name in ("engine", "staleness", "drift")
    }
    return {f"parity/{n}_share": c.end() for n, c in courses.items() if c.has_end}


def _where(record: RunRecord) -> str:
    """The worst token of the latest step that wrote any."""
    if not record.worst_tokens:
        return ""
    worst = record.worst_tokens[0]
    return (
        f"; worst of the latest step: {worst['text']!r} at {worst['position']} of "
        f"{worst['rollout']}, {worst['trainer']:.3g} for {worst['sampler']:.3g} ({worst['part']})"
    )


@rule("stale-weights", "error")
def stale_weights(record: RunRecord) -> Iterator[Symptom]:
    """Rollouts were drawn with older weights than the run allows."""
    allowed, late = record.config.trainer.max_staleness, dict[int, list[tuple[int, str]]]()
    for step, rollouts in record.rollouts.items():
        for recorded in rollouts:
            versions = [v for b in recorded.rollout.branches for v in b.versions if v is not None]
            # Step s begins with the weights of s - 1 updates.
            age = (step - 1) - min(versions) if versions else 0
            if age > allowed:
                late.setdefault(step, []).append((age, name_of(recorded)))
    if late:
        oldest = max(age for found in late.values() for age, _ in found)
        yield Symptom(
            says=f"rollouts are up to {oldest} steps old; trainer.max_staleness is {allowed}",
            experiment=repair("look whether the engine receives the weights after every update"),
            steps=tuple(sorted(late)),
            numbers={"oldest": float(oldest), "allowed": float(allowed)},
            rollouts=tuple(name for found in late.values() for _, name in found[:1]),
        )


@rule("truncation", "warning", steps=WINDOW)
def truncation(record: RunRecord) -> Iterator[Symptom]:
    """Most answers end at the token budget."""
    cut = record.course("response_length/cut_fraction")
    if cut.has_end and cut.end() > _CUT:
        yield Symptom(
            says=f"{cut.end():.0%} of the answers of the last {WINDOW} steps are cut at "
            f"data.max_response_length={record.config.data.max_response_length}",
            experiment=roomier(record),
            steps=cut.last_steps,
            numbers={"response_length/cut_fraction": cut.end()},
        )


@rule("length-explosion", "warning", steps=2 * WINDOW)
def length_explosion(record: RunRecord) -> Iterator[Symptom]:
    """Answers grow and the reward does not."""
    length, reward = record.course("response_length/mean"), record.course("reward/mean")
    if not length.has_both_ends or not reward.has_both_ends:
        return
    spread = record.course("reward/std").start() if len(record.course("reward/std")) else 0.0
    is_longer = length.end() > max(_LONGER * length.start(), length.start() + _TOKENS)
    if is_longer and reward.end() <= reward.start() + _GAIN * spread:
        yield Symptom(
            says=f"answers have {length.end():.3g} tokens instead of {length.start():.3g}, and the "
            f"reward is {reward.end():.3g} instead of {reward.start():.3g}",
            experiment=shorter(record),
            steps=length.last_steps,
            numbers={
                "response_length/mean": length.end(),
                "at the beginning": length.start(),
                "reward/mean": reward.end(),
            },
        )
