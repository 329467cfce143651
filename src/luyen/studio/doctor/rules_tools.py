"""Rules about conversations with tools."""

from collections.abc import Iterator

from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Symptom, rule
from luyen.studio.doctor.read import RunRecord
from luyen.studio.doctor.tuning import other_data, repair

_NEVER = 0.01
"""Share of conversations with a call: one in a hundred teaches no use of tools."""
_FAILING = 0.2
"""Share of calls that succeed: four of five are wasted turns."""


@rule("tools-never-called", "warning", steps=WINDOW)
def tools_never_called(record: RunRecord) -> Iterator[Symptom]:
    """Tools are on offer and nobody calls them."""
    multi_turn = record.config.actor_rollout_ref.rollout.multi_turn
    offers = bool(multi_turn.tool_config_path or multi_turn.function_tool_path)
    called = record.course("tools/call_fraction")
    if multi_turn.enable and offers and called.has_end and called.end() < _NEVER:
        yield Symptom(
            says=f"{called.end():.1%} of the conversations of the last {WINDOW} steps call a tool",
            experiment=repair(
                f"`luyen rollout --pretty`: does the policy write calls as multi_turn.format="
                f"{multi_turn.format} reads them, and does the prompt show the tools?"
            ),
            steps=called.last_steps,
            numbers={"tools/call_fraction": called.end()},
        )


@rule("tools-failing", "warning", steps=WINDOW)
def tools_failing(record: RunRecord) -> Iterator[Symptom]:
    """Nearly every tool call fails, or cannot be read."""
    for name, change in (
        (
            "tools/success_fraction",
            repair("read `calls` in rollouts/: the tool raises or times out, whatever it is asked"),
        ),
        (
            "tools/valid_fraction",
            other_data(
                "show calls in the prompt, or teach the format first (trainer.stage=sft)",
                "look whether multi_turn.format is the one the model was trained with",
            ),
        ),
    ):
        share = record.course(name)
        if share.has_end and share.end() < _FAILING:
            yield Symptom(
                says=f"{name} is {share.end():.0%} in the last {WINDOW} steps with calls",
                experiment=change,
                steps=share.last_steps,
                numbers={name: share.end()},
            )
