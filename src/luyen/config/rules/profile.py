"""S: the steps that are profiled."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_STEPS = "trainer.profile.steps"


@rule("S16", "error")
def profiled_steps_are_steps(s: Situation) -> Iterator[Finding]:
    """Profiled steps are counted from 1."""
    wrong = [step for step in s.config.trainer.profile.steps if step < 1]
    if wrong:
        yield Finding(field=_STEPS, why=f"there is no step {wrong[0]}", fix="count from 1")


@rule("S17", "warning")
def profiled_steps_are_reached(s: Situation) -> Iterator[Finding]:
    """Profiled steps come before the run is over."""
    trainer = s.config.trainer
    total = trainer.total_training_steps
    late = [step for step in trainer.profile.steps if total is not None and step > total]
    if late:
        why = f"step {late[0]} never comes in a run of {total}"
        yield Finding(field=_STEPS, why=why, fix=f"name steps up to {total}")


@rule("S18", "warning")
def profile_has_steps(s: Situation) -> Iterator[Finding]:
    """Keys of the profile are changed only when steps are profiled."""
    profile = s.config.trainer.profile
    for name in ("memory", "save_path"):
        if not profile.steps and s.is_changed(f"trainer.profile.{name}"):
            yield Finding(
                field=f"trainer.profile.{name}",
                why="no step is profiled, so it has no effect",
                fix=f"set {_STEPS}, or drop it",
            )
