"""`luyen rollout`: conversations of a policy, printed with tokens and scores."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from luyen.base.records import Branch, CallStatus, Prompt, Rollout, Score, Source, ToolCall
from luyen.cli.common import Trust, prepare

if TYPE_CHECKING:
    from luyen.data.tokenizer import Tokenizer
    from luyen.pipeline.policy_loading import LoadedPolicy


_COLOURS = {
    Source.PROMPT: "cyan",
    Source.SAMPLED: "bold green",
    Source.TOOL: "yellow",
    Source.TEMPLATE: "bright_black",
}


def run_rollout(
    words: Sequence[str],
    *,
    count: int,
    samples: int,
    is_validation: bool,
    is_pretty: bool,
    as_json: bool,
    is_trusted: bool,
) -> int:
    """Generate and print rollouts; 1 when the configuration has errors."""
    opened = _opened(words, is_trusted=is_trusted)
    if opened is None:
        return 1
    from luyen.studio.evaluation.evaluator import sample_rollouts

    pairs = sample_rollouts(opened, count=count, samples=samples, is_validation=is_validation)
    if as_json:
        page = [rollout_json(prompt, rollout) for prompt, rollout in pairs]
        typer.echo(json.dumps(page, indent=2, ensure_ascii=False, default=str))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if is_pretty:
        console.print(legend())
    for number, (prompt, rollout) in enumerate(pairs):
        console.print(Text(f"\nrollout {number}: {_headline(rollout)}", style="bold"))
        for part in _body(opened, prompt, rollout, is_pretty=is_pretty):
            console.print(part)
    return 0


def _opened(words: Sequence[str], *, is_trusted: bool) -> "LoadedPolicy | None":
    """The policy of a checkpoint, or the one that a configuration starts from, once it is sound."""
    from luyen.cli.check import problem_lines, split_words
    from luyen.config.check import check
    from luyen.config.machine import this_machine
    from luyen.config.trust import require_trusted_files

    files, overrides = split_words(words)
    if len(files) == 1 and files[0].suffix not in (".yaml", ".yml"):
        prepare()
        from luyen.pipeline.policy_loading import open_checkpoint

        return open_checkpoint(str(files[0]), overrides, is_trusted=is_trusted)
    require_trusted_files(files, is_trusted=is_trusted)
    report = check(files, overrides, machine=this_machine(), starts_a_run=False)
    if not report.is_sound:
        for line in problem_lines(report, [str(file) for file in files]):
            typer.echo(line)
        return None
    prepare()
    from luyen.pipeline.policy_loading import open_initial_policy

    return open_initial_policy(report.config)


def legend() -> Text:
    """Legend of the token colours."""
    text = Text("origin of each token: ")
    for source, colour in _COLOURS.items():
        text.append(source.name.lower(), style=colour).append("  ")
    return text


def _headline(rollout: Rollout) -> str:
    reward = "no reward"
    if rollout.score is not None and rollout.score.value is not None:
        reward = f"reward {rollout.score.value:g}"
    turns = f"{rollout.num_turns} turn{'' if rollout.num_turns == 1 else 's'}"
    calls = f"{len(rollout.calls)} call{'' if len(rollout.calls) == 1 else 's'}"
    return f"{turns}, {calls}, {rollout.stop.value}, {reward}"


def _body(
    opened: "LoadedPolicy", prompt: Prompt, rollout: Rollout, *, is_pretty: bool
) -> Iterator[Text]:
    if is_pretty:
        for branch in rollout.branches:
            yield coloured(branch, opened.tokenizer)
    else:
        yield from _messages(prompt, rollout)
    if rollout.fault is not None:
        yield Text(f"  fault: {rollout.fault}", style="red")
    if rollout.calls:
        yield Text("  calls", style="bold")
        for made in rollout.calls:
            yield Text(f"    {_call_line(made)}", style="" if made.error is None else "red")
    if rollout.score is not None:
        yield Text("  reward", style="bold")
        for line in score_lines(rollout.score):
            yield Text(f"    {line}")


def _messages(prompt: Prompt, rollout: Rollout) -> Iterator[Text]:
    """The conversation as messages; a single turn has only its text."""
    answers = rollout.messages or ({"role": "assistant", "content": rollout.text},)
    for message in (*prompt.messages, *answers):
        text = str(message.get("written") or message.get("content") or "")
        yield Text(f"  {message['role']}: {text}")


def coloured(branch: Branch, tokenizer: "Tokenizer") -> Text:
    """The tokens as text, each stretch of one origin in its colour."""
    text = Text()
    start = 0
    for place in range(1, len(branch.tokens) + 1):
        if place == len(branch.tokens) or branch.sources[place] != branch.sources[start]:
            part = tokenizer.decode(branch.tokens[start:place], skip_special=False)
            text.append(part, style=_COLOURS[branch.sources[start]])
            start = place
    return text


def _call_line(made: ToolCall) -> str:
    arguments = json.dumps(dict(made.arguments), ensure_ascii=False, default=str)
    how = "" if made.status == CallStatus.OK else f" [{made.status.value}]"
    return f"turn {made.turn}: {made.name}{arguments}{how} -> {made.result}"


def score_lines(score: Score, depth: int = 0) -> Iterator[str]:
    """The tree of a score, a line each.

    Example:
        >>> right = Score(name="right", value=1.0, weight=0.5)
        >>> list(score_lines(Score(name="reward", value=0.5, parts=(right,))))
        ['reward 0.5', '  right 1 x 0.5']
    """
    value = f"{score.value:g}" if score.value is not None else f"none ({score.error})"
    weight = "" if score.weight == 1.0 else f" x {score.weight:g}"
    turns = "".join(f", turn {turn}: {share:g}" for turn, share in score.by_turn)
    yield f"{'  ' * depth}{score.name} {value}{weight}{score.remarks()}{turns}"
    for part in score.parts:
        yield from score_lines(part, depth + 1)


def rollout_json(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain data."""
    return {
        "group": str(rollout.group),
        "sample": rollout.sample,
        "data_source": prompt.data_source,
        "prompt": [dict(message) for message in prompt.messages],
        "tools": [dict(tool) for tool in prompt.tools],
        "ground_truth": prompt.ground_truth,
        "messages": [dict(message) for message in rollout.messages],
        "answer": rollout.text,
        "stop": rollout.stop.value,
        "fault": rollout.fault,
        "turns": rollout.num_turns,
        "calls": [
            {
                "turn": made.turn,
                "name": made.name,
                "arguments": dict(made.arguments),
                "status": made.status.value,
                "result": made.result,
                "error": made.error,
                "reward": made.reward,
                "seconds": made.seconds,
            }
            for made in rollout.calls
        ],
        "branches": [
            {
                "tokens": list(branch.tokens),
                "sources": [source.name.lower() for source in branch.sources],
                "turns": list(branch.turns),
                "logps": list(branch.logps),
            }
            for branch in rollout.branches
        ],
        "reward": None if rollout.score is None else _score_json(rollout.score),
        "notes": dict(rollout.notes),
    }


def _score_json(score: Score) -> dict[str, Any]:
    return {
        "name": score.name,
        "value": score.value,
        "weight": score.weight,
        "raw": score.raw,
        "gated": score.gated,
        "combine": score.combine,
        "turned": score.turned,
        "seconds": score.seconds,
        "reply": score.reply,
        "by_turn": [list(pair) for pair in score.by_turn],
        "error": score.error,
        "parts": [_score_json(part) for part in score.parts],
    }


def rollout(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, the later over the earlier, or a checkpoint; then overrides.",
            metavar="CONFIG... [KEY=VALUE]...",
        ),
    ],
    n: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each prompt.")] = 1,
    validation: Annotated[
        bool, typer.Option("--validation", help="Use validation rows and sampling.")
    ] = False,
    pretty: Annotated[
        bool, typer.Option("--pretty", help="Show every token in the colour of its origin.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rollouts as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Generate rollouts and show messages, tool calls and rewards.

    Nothing is trained and nothing is written.
    """
    code = run_rollout(
        config,
        count=n,
        samples=samples,
        is_validation=validation,
        is_pretty=pretty,
        as_json=as_json,
        is_trusted=trust,
    )
    raise typer.Exit(code)
