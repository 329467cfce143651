"""The examples of the Python API train, in a script and cell by cell as a notebook runs them."""

import ast
import asyncio
import contextlib
import io
import linecache
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import luyen
from tests.architecture.tree import ROOT

EXAMPLES = sorted((ROOT / "examples" / "python_api").glob("*.py"))
PNG = b"\x89PNG\r\n"


def ran(path: Path) -> tuple[luyen.Run, str]:
    """The run of an example, and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        names = runpy.run_path(str(path), run_name="__main__")
    return names["run"], said.getvalue()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_and_its_run_can_be_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert len(path.read_text().splitlines()) <= 26
    run, said = ran(path)
    assert (run.facts.state, run.facts.steps) == ("finished", 3)
    assert "step 3/3" in said
    assert "\x1b" not in said, "progress in a notebook is plain lines"
    _is_readable(run)
    if path.stem == "grpo":
        _has_rollouts(run)


def _is_readable(run: luyen.Run) -> None:
    table = run.metrics()
    assert [row["step"] for row in table] == [0, 1, 2, 3]
    frame = table.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["step"]) == table.column("step")
    assert table.to_arrow().column_names == table.names
    assert [row["step"] for row in run.validation()] == [0, 3]
    assert all("val" in name for name in run.validation().names if name != "step")
    assert run.plot().png.startswith(PNG)
    shown = run._repr_html_()
    assert "3 of 3" in shown
    assert "data:image/png;base64," in shown
    assert "<th>step</th>" in table._repr_html_()
    with pytest.raises(luyen.UserError, match="no step of the run has it"):
        run.plot("reward/maen")
    assert luyen.load_run(run.root).config()["trainer"]["total_training_steps"] == 3


def _has_rollouts(run: luyen.Run) -> None:
    one, every = run.rollouts(2), run.rollouts()
    assert one.num_rows == 32
    assert every.num_rows == 3 * 32
    assert set(every.column("step").to_pylist()) == {1, 2, 3}
    assert run.rollouts(split="validation").num_rows == 2 * 10
    assert list(one.to_pandas()["reward"]) == one.column("reward").to_pylist()
    saved = run.plot("reward/mean", "val/accuracy").save("curve.png")
    assert saved.read_bytes().startswith(PNG)


CELLS = (
    "import luyen\nscores = []",
    "def near(completions, answer, **columns):\n"
    "    scores.append(len(completions))\n"
    "    return [float(c.strip() == a) for c, a in zip(completions, answer)]",
    "rows = [{'question': f'{a}+1=', 'answer': str(a + 1)} for a in range(8)]",
    "run = luyen.train({'data.train_batch_size': 4, 'data.max_response_length': 8,\n"
    "                   'actor_rollout_ref.rollout.n': 2}, model='builtin://arithmetic',\n"
    "                  data=rows, reward=near, trainer={'total_training_steps': 2})",
    "run.plot('reward/mean')",
    "run",
)


class Cells:
    """Runs cells as a notebook does: each has its own source, and the last value is shown."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    async def run(self, number: int, source: str) -> Any:
        """The value of the last expression of a cell; an event loop runs, as in a notebook."""

        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self.names)
        if last is None:
            return None
        assert isinstance(last, ast.Expr)
        return eval(compile(ast.Expression(last.value), name, "eval"), self.names)


def test_cells_of_a_notebook_train_and_show_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    cells = Cells()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        shown = [asyncio.run(cells.run(number, source)) for number, source in enumerate(CELLS)]
    assert shown[-2]._repr_png_().startswith(PNG)
    assert "2 of 2" in shown[-1]._repr_html_()
    assert sum(cells.names["scores"]) == 2 * 4 * 2
    assert said.getvalue().count("step ") == 2
    [file] = shown[-1].directory.inputs.glob("reward-*.py")
    assert "def near(completions" in file.read_text()
