"""The pictures of the README, drawn from run directories.

    luyen train recipes/quickstart.yaml
    luyen train recipes/tool_calling.yaml trainer.total_training_steps=1
    python benchmarks/readme_pictures.py runs/luyen/quickstart runs/luyen/tool_calling

`quickstart.png`: reward and validation accuracy over the steps of the first run. `rollout.png`: of
a step of the second, the first group in which one answer called a tool and was right, and another
guessed and was wrong; one of each, token by token.
"""

import argparse
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

import luyen
from luyen.data.tokenizer import Tokenizer, load_tokenizer

PROMPT, SAMPLED, TOOL, TEMPLATE = range(4)
LABELS = {PROMPT: "prompt", SAMPLED: "sampled", TOOL: "tool result", TEMPLATE: "template"}
GREY, DARK, TOOL_FACE, TOOL_EDGE = "#e9e9e9", "#222222", "#fff3c4", "#d9a400"
BETTER, WORSE = "#2a9d8f", "#e4572e"
"""Colours of the largest positive and the largest negative advantage; smaller ones are paler."""
COLUMNS = 73
"""Characters in a line of a rollout."""
SMOOTHED = 9
"""Steps of the moving average of the reward."""


class Box(NamedTuple):
    """A token: where it stands, in lines and characters, and how it looks."""

    line: int
    column: int
    text: str
    source: int
    advantage: float | None


def plot_curve(run: luyen.Run, path: Path) -> None:
    """Reward at every step, and accuracy on held-out rows with its interval."""
    rows = run.metrics()
    figure = Figure(figsize=(8, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    trained = [row for row in rows if "reward/mean" in row]
    steps, rewards = [row["step"] for row in trained], [row["reward/mean"] for row in trained]
    axes.plot(steps, rewards, color="#9cc3d5", linewidth=1)
    axes.plot(
        steps,
        moving_average(rewards),
        color="#1f6f8b",
        linewidth=2,
        label="reward, training prompts",
    )
    measured = [row for row in rows if "val/accuracy" in row]
    at, accuracy = [row["step"] for row in measured], [row["val/accuracy"] for row in measured]
    below = [row["val/accuracy"] - row["val/accuracy_low"] for row in measured]
    above = [row["val/accuracy_high"] - row["val/accuracy"] for row in measured]
    axes.errorbar(
        at, accuracy, yerr=[below, above], color="#c8553d", marker="o", markersize=5,
        linewidth=1.5, capsize=3, elinewidth=1, label="accuracy, held-out prompts (95 % interval)",
    )  # fmt: skip
    for step, value in ((at[0], accuracy[0]), (at[-1], accuracy[-1])):
        axes.annotate(
            f"{value:.3f}", (step, value), xytext=(6, -15), textcoords="offset points",
            color="#c8553d", fontsize=10, fontweight="bold",
        )  # fmt: skip
    axes.set(xlabel="step", xlim=(-2, at[-1] + 7), ylim=(0.25, 1.0))
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
    save(figure, path)


def moving_average(values: Sequence[float]) -> list[float]:
    """Means over `SMOOTHED` steps around each, fewer at the ends."""
    half = SMOOTHED // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def plot_rollouts(run: luyen.Run, step: int, path: Path) -> None:
    """A rollout with a tool call and one without, of the same prompt."""
    pair = contrast(run.rollouts(step).to_pylist())
    tokenizer = load_tokenizer(run.config()["actor_rollout_ref"]["model"]["path"])
    boxes = [list(laid_out(row, tokenizer)) for row in pair]
    heights = [found[-1].line + 2.4 for found in boxes]
    figure = Figure(figsize=(8.8, 0.27 * sum(heights) + 0.45), dpi=110, layout="constrained")
    largest = max(abs(value) for row in pair for value in row["advantage"] if value is not None)
    all_axes = figure.subplots(2, 1, height_ratios=heights)
    for axes, row, found in zip(all_axes, pair, boxes, strict=True):
        draw(axes, row, found, largest)
    figure.suptitle(
        f"Two of the {group_size(run, step, pair[0])} rollouts of one prompt, step {step}; "
        "sampled tokens are coloured by advantage",
        fontsize=11, x=0.01, ha="left",
    )  # fmt: skip
    save(figure, path)


def contrast(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the first group that has both: a right answer with a call, and a wrong one without."""
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        called = [row for row in members if row["calls"] != "[]" and row["reward"] == 1.0]
        guessed = [row for row in members if row["calls"] == "[]" and row["reward"] == 0.0]
        if called and guessed:
            return [called[0], guessed[0]]
    raise SystemExit("no group of that step has both kinds of answers: try another step")


def group_size(run: luyen.Run, step: int, row: Mapping[str, Any]) -> int:
    """Rollouts of the group of a row."""
    return run.rollouts(step).column("group").to_pylist().count(row["group"])


def laid_out(row: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[Box]:
    """The tokens in lines: a new one at either end of a turn, and before text that does not fit."""
    line = column = 0
    texts = [tokenizer.decode([n], skip_special=False).replace("\n", "↵") for n in row["tokens"]]
    sources = row["sources"]
    for i, (text, source) in enumerate(zip(texts, sources, strict=True)):
        is_turn = i > 0 and (source == SAMPLED) != (sources[i - 1] == SAMPLED)
        is_begun = i > 0 and texts[i - 1] != "↵" and not is_turn
        ahead = text if is_begun else "".join(paragraph(texts, sources, i))
        if column and (is_turn or column + len(ahead) > COLUMNS):
            line, column = line + 1, 0
        yield Box(line, column, text, source, row["advantage"][i])
        column += len(text)


def paragraph(texts: Sequence[str], sources: Sequence[int], start: int) -> Iterator[str]:
    """Tokens from one on, up to the end of the line or of the turn that it is in."""
    for text, source in zip(texts[start:], sources[start:], strict=True):
        if (source == SAMPLED) != (sources[start] == SAMPLED):
            return
        yield text
        if text == "↵":
            return


def draw(axes: Axes, row: Mapping[str, Any], boxes: Sequence[Box], largest: float) -> None:
    """The boxes of one rollout, with a label at every line and the reward below."""
    axes.set(xlim=(-11, COLUMNS + 1), ylim=(boxes[-1].line + 2.0, -0.4))
    axes.axis("off")
    for box in boxes:
        axes.add_patch(frame(box, largest))
        axes.text(
            box.column + len(box.text) / 2, box.line + 0.5, box.text, family="monospace",
            fontsize=10.5, ha="center", va="center", color=DARK,
        )  # fmt: skip
    for line in dict.fromkeys(box.line for box in boxes):
        sources = dict.fromkeys(box.source for box in boxes if box.line == line)
        label = LABELS[TOOL] if TOOL in sources else LABELS[next(iter(sources))]
        axes.text(-1, line + 0.5, label, fontsize=9, ha="right", va="center", color="#555555")
    advantage = next(box.advantage for box in boxes if box.advantage is not None)
    axes.text(
        0, boxes[-1].line + 1.55, f"reward {row['reward']:g}, advantage {advantage:+.2f}",
        fontsize=10, fontweight="bold", va="center", color=DARK,
    )  # fmt: skip


def frame(box: Box, largest: float) -> Rectangle:
    """The background of a token."""
    face, edge = GREY, "white"
    if box.source == TOOL:
        face, edge = TOOL_FACE, TOOL_EDGE
    elif box.advantage is not None:
        face = shade(box.advantage / largest)
    return Rectangle(
        (box.column, box.line + 0.06), len(box.text), 0.88, facecolor=face, edgecolor=edge,
        linewidth=0.8,
    )  # fmt: skip


def shade(share: float) -> tuple[float, float, float]:
    """White towards the colour of the sign, at least a third of the way."""
    strength = 0.33 + 0.42 * abs(share)
    red, green, blue = to_rgb(BETTER if share > 0 else WORSE)
    return (
        1 - strength * (1 - red),
        1 - strength * (1 - green),
        1 - strength * (1 - blue),
    )


def save(figure: Figure, path: Path) -> None:
    """The picture as a file, on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    # 48 colours are enough for flat areas and smoothed letters, and take half of the bytes.
    Image.open(drawn).convert("RGB").quantize(48).save(path, optimize=True)


def main() -> None:
    """Read the runs that the command line names, draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("quickstart", help="run directory of the quickstart")
    parser.add_argument("tools", help="run directory of a recipe with tools")
    parser.add_argument("--step", type=int, default=1, help="step of the second run")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    plot_curve(luyen.load_run(given.quickstart), given.folder / "quickstart.png")
    plot_rollouts(luyen.load_run(given.tools), given.step, given.folder / "rollout.png")


if __name__ == "__main__":
    main()
