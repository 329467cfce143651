"""Z: code that a policy writes runs only behind the walls that the run demands."""

from collections.abc import Iterator

from luyen.config.programs import judges_programs, runs_programs
from luyen.config.rules.rule import Finding, Situation, rule

_REQUIRE = "sandbox.require"


@rule("Z01", "error")
def required_walls_stand(s: Situation) -> Iterator[Finding]:
    """Every promise under `sandbox.require` is kept on this machine."""
    if runs_programs(s.config):
        lost = [one for one in s.missing_promises() if one in s.config.sandbox.require]
        if lost:
            why = f"nothing on this machine keeps {', '.join(lost)} of programs out of reach"
            fix = "see `luyen selftest --sandbox`; run where the walls stand, or drop the demand"
            yield Finding(field=_REQUIRE, why=why, fix=fix)


@rule("Z02", "warning")
def missing_walls_are_named(s: Situation) -> Iterator[Finding]:
    """Code of a policy runs although a promise is not kept here."""
    if runs_programs(s.config):
        lost = [one for one in s.missing_promises() if one not in s.config.sandbox.require]
        if lost:
            why = f"programs of the policy run, and nothing here keeps this safe: {', '.join(lost)}"
            fix = f"see `luyen selftest --sandbox`; {_REQUIRE}=[{','.join(lost)}] refuses the run"
            yield Finding(field=_REQUIRE, why=why, fix=fix)


@rule("Z03", "note")
def forgeable_verdicts_are_named(s: Situation) -> Iterator[Finding]:
    """Some assertions are judged in the program's interpreter, which can make them pass."""
    if judges_programs(s.config) and "verdicts" not in s.config.sandbox.require:
        why = (
            "rows with other assertions than `assert CALL == LITERAL` and its like are judged "
            "beside the program, which can forge their verdict; reward/.../forgeable counts them"
        )
        yield Finding(field=_REQUIRE, why=why, fix=f"{_REQUIRE}=[verdicts] refuses such rows")


@rule("Z04", "warning")
def demands_have_something_to_hold(s: Situation) -> Iterator[Finding]:
    """`sandbox.require` is set where code of the policy is run."""
    config = s.config
    if config.sandbox.require and not runs_programs(config) and not config.trainer.plugins:
        why = "neither the rule `code` nor the tool `python` is used, so no program is run"
        yield Finding(field=_REQUIRE, why=why, fix="drop it")
    elif "verdicts" in config.sandbox.require and not judges_programs(config):
        why = "the rule `code` is not used, so there are no verdicts on programs"
        yield Finding(field=_REQUIRE, why=why, fix="drop `verdicts`")
