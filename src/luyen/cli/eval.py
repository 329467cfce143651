"""`luyen eval`: a checkpoint measured on validation rows."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import json_page, write_whole
from luyen.base.records import Rollout
from luyen.cli.quiet import prepare

if TYPE_CHECKING:
    from luyen.train.checkpointed import Opened
    from luyen.train.measure import Measured

_INDENT = "    "


def run_eval(
    checkpoint: str, overrides: Sequence[str], *, as_json: bool, out: Path | None, shown: int
) -> int:
    """Measure, print, and write where asked to."""
    if out is not None and not out.parent.is_dir():
        raise UserError("--out", str(out), "its folder is not there", "make the folder first")
    prepare()
    from luyen.train.checkpointed import open_checkpoint

    started = time.monotonic()
    opened = open_checkpoint(checkpoint, overrides)
    measured = _with_progress(opened)
    seconds = time.monotonic() - started
    if out is not None:
        write_whole(out, json_page(report_json(opened, measured, shown=None)))
    if as_json:
        page = report_json(opened, measured, shown=shown)
        typer.echo(json.dumps(page, indent=2, ensure_ascii=False))
    else:
        for line in report_lines(opened, measured, shown=shown, seconds=seconds):
            typer.echo(line)
    return 0


def _with_progress(opened: "Opened") -> "Measured":
    """Measure with a bar on the terminal; nothing is shown where standard error is no terminal."""
    from luyen.train.measure import measure

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("prompts", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return measure(opened, progress=progress)


def report_json(opened: "Opened", measured: "Measured", *, shown: int | None) -> dict[str, Any]:
    """The whole report as plain data; `shown` limits the prompts whose rollouts are in it."""
    return {
        "checkpoint": opened.name,
        "step": opened.step,
        "prompts": len(measured.groups),
        "samples": opened.config.actor_rollout_ref.rollout.val_kwargs.n,
        "metrics": dict(measured.metrics),
        "rollouts": [
            {
                "data_source": group.prompt.data_source,
                "prompt": [dict(message) for message in group.prompt.messages],
                "ground_truth": group.prompt.ground_truth,
                "sample": rollout.sample,
                "answer": rollout.text,
                "reward": rollout.score.value if rollout.score is not None else None,
                "fault": rollout.fault,
                "stop": rollout.stop.value,
            }
            for group in measured.groups[:shown]
            for rollout in group.rollouts
        ],
    }


def report_lines(
    opened: "Opened", measured: "Measured", *, shown: int, seconds: float
) -> Iterator[str]:
    """The whole report for people."""
    samples = opened.config.actor_rollout_ref.rollout.val_kwargs.n
    each = f"{samples} sample{'' if samples == 1 else 's'}"
    yield opened.name
    yield f"{len(measured.groups)} prompts x {each}, {seconds:.1f} s"
    if faults := measured.metrics.get("val/faults"):
        yield f"{faults:g} conversations broke and are left out"
    yield ""
    yield from _table(measured)
    if shown:
        yield ""
        yield "Samples"
        for group in measured.groups[:shown]:
            yield f"  {_one_line(group.prompt.messages[-1]['content'])}"
            yield f"{_INDENT}{_words(group.rollouts[0], group.prompt.ground_truth)}"


def _table(measured: "Measured") -> Iterator[str]:
    """A line per data source, and one over all where there are several."""
    sources = list(dict.fromkeys(group.prompt.data_source for group in measured.groups))
    prefixes = {source: f"val/{source}" for source in sources}
    if len(sources) != 1:
        prefixes["all"] = "val"
    width = max(len(name) for name in ("source", *prefixes))
    passes = sorted((n for n in measured.metrics if n.startswith("val/pass@")), key=_number)
    heads = [f"pass@{_number(name)}" for name in passes]
    yield f"{'source':{width}s}  accuracy  95 % interval   reward  {'  '.join(heads)}"
    for name, prefix in prefixes.items():
        found = measured.metrics
        low, high = found[f"{prefix}/accuracy_low"], found[f"{prefix}/accuracy_high"]
        mean = next(v for n, v in found.items() if n.startswith(f"{prefix}/reward/mean@"))
        chances = [f"{found.get(f'{prefix}/{head}', mean):{len(head)}.3f}" for head in heads]
        yield (
            f"{name:{width}s}  {found[f'{prefix}/accuracy']:8.3f}  {low:.3f} to {high:.3f}  "
            f"{mean:6.3f}  {'  '.join(chances)}"
        )


def _number(metric: str) -> int:
    return int(metric.rpartition("@")[2])


def _words(rollout: Rollout, truth: object) -> str:
    reward = rollout.score.value if rollout.score is not None else None
    judged = f"reward {reward:g}" if reward is not None else f"no reward: {rollout.fault}"
    right = f", ground truth {truth}" if truth is not None else ""
    return f"{_one_line(rollout.text)}   ({judged}{right})"


def _one_line(text: str, most: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 3] + "..."
