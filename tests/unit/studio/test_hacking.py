"""The rule about hacked rewards, on runs made by hand: where it speaks, and where it is silent."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luyen.base.records import Score
from luyen.base.seeds import derive_key, uniform
from luyen.telemetry.rollout_files import RecordedRollout
from tests.unit.studio.run_files import rollout, seen, write_run, write_steps

STEPS, GROUPS = 12, 24
LEARNED = (
    "reward: {components: {taste: {model: reward_model}, exact: {rule: exact, weight: 0.0}},"
    " reward_model: {enable: true, model_path: judge}}"
)
PLAIN = "reward: {components: {taste: {rule: length}, exact: {rule: exact, weight: 0.0}}}"
Course = Callable[[int, float], tuple[float, float]]
"""(step, a random number) -> what was learned from, and what was watched."""


def judged(step: int, draw: int, taste: float, exact: float, *, tokens: int = 2) -> RecordedRollout:
    """A rollout with a tree of two components."""
    made = rollout(step, draw=draw, answer=tuple(range(60, 60 + tokens)))
    parts = (Score(name="taste", value=taste), Score(name="exact", value=exact, weight=0.0))
    score = Score(name="reward", value=taste, parts=parts)
    return replace(made, rollout=replace(made.rollout, score=score))


def play(
    root: Path,
    course: Course,
    *,
    config: str = LEARNED,
    length: Callable[[int], int] = lambda step: 2,
    seed: int = 0,
) -> Path:
    """A run whose rollouts and metrics follow a course."""
    rows: list[RecordedRollout] = []
    for step in range(1, STEPS + 1):
        for draw in range(GROUPS):
            chance = uniform(derive_key(seed, "chance", step), draw)
            rows.append(judged(step, draw, *course(step, chance), tokens=length(step)))
    by_step = [[r.rollout for r in rows if r.rollout.group.step == s + 1] for s in range(STEPS)]
    trees = [[r.score for r in some if r.score is not None] for some in by_step]
    means = [sum(s.value or 0.0 for s in some) / GROUPS for some in trees]
    watched = [sum(s.parts[1].value or 0.0 for s in some) / GROUPS for some in trees]
    courses = {"reward/mean": means, "reward/std": [0.5] * STEPS, "reward/exact/mean": watched}
    made = write_run(root, courses, config=config)
    write_steps(made, rows)
    return made


def test_a_watched_component_that_falls_is_named_with_examples(tmp_path: Path):
    course = lambda step, u: (0.1 * step, float(u < 0.9 - 0.07 * step))  # noqa: E731
    [symptom] = seen(play(tmp_path / "run", course), "reward-hacking")
    assert "reward/exact/mean, which is watched, fell" in symptom.says
    assert symptom.numbers["standard errors"] < -4
    assert len(symptom.rollouts) == 3
    assert "pairs in which such answers lose" in symptom.experiment.then[0]


def test_a_fall_after_a_rise_is_found_too(tmp_path: Path):
    share = {1: 0.3, 2: 0.6, 3: 0.95, 4: 0.95, 5: 0.95}
    course = lambda step, u: (0.1 * step, float(u < share.get(step, 0.2)))  # noqa: E731
    assert len(seen(play(tmp_path / "run", course), "reward-hacking")) == 1


def test_a_correlation_that_turns_is_named_while_the_mean_stays(tmp_path: Path):
    def course(step: int, u: float) -> tuple[float, float]:
        is_right = u < 0.5
        return 0.1 * step + (0.5 if is_right == (step <= 6) else 0.0), float(is_right)

    [symptom] = seen(play(tmp_path / "run", course), "reward-hacking")
    assert "stayed at" in symptom.says
    assert symptom.numbers["correlation"] < 0


def test_growth_is_named_only_where_a_learned_reward_pays_for_it(tmp_path: Path):
    course = lambda step, u: (0.1 * step, float(u < 0.5))  # noqa: E731
    longer = lambda step: 2 + step  # noqa: E731
    [symptom] = seen(play(tmp_path / "run", course, length=longer), "reward-hacking")
    assert "response length rose from" in symptom.says
    assert seen(play(tmp_path / "a", course, length=longer, config=PLAIN), "reward-hacking") == []
    better = lambda step, u: (0.1 * step, float(u < 0.3 + 0.05 * step))  # noqa: E731
    assert seen(play(tmp_path / "b", better, length=longer), "reward-hacking") == []


def test_a_penalty_is_nothing_that_a_reward_stands_for(tmp_path: Path):
    course = lambda step, u: (0.1 * step, -0.1 * step - 0.1 * u)  # noqa: E731
    assert seen(play(tmp_path / "run", course), "reward-hacking") == []


def test_without_a_rise_there_is_no_hacking(tmp_path: Path):
    course = lambda step, u: (0.5 - 0.01 * step, float(u < 0.9 - 0.07 * step))  # noqa: E731
    assert seen(play(tmp_path / "run", course), "reward-hacking") == []


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9), gain=st.floats(0.0, 0.02))
def test_noise_around_a_course_that_does_not_fall_is_no_evidence(
    seed: int, share: float, gain: float, tmp_path_factory: object
):
    root = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]

    def course(step: int, u: float) -> tuple[float, float]:
        is_right = u < share + gain * step
        return 0.1 * step + 0.5 * is_right, float(is_right)

    assert seen(play(root / "run", course, seed=seed), "reward-hacking") == []
