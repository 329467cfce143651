"""A folder of runs for the walk through the studio: finished, with tools, killed, damaged, hostile.

`python -m tests.browser.make_runs FOLDER` trains them; what is there already is kept.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from luyen.base.records import CallStatus, Score, ToolCall
from luyen.base.rundir import RunDirectory
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import write_rollouts
from tests.unit.studio.run_files import rollout

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"quickstart": 8, "tool_calling": 6}


def _command(recipe: str, name: str, folder: Path, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "luyen", "train", str(ROOT / f"recipes/{recipe}.yaml")),
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=4",
        "trainer.save_freq=4",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
    ]


def train(recipe: str, name: str, folder: Path) -> None:
    """Train a recipe for a few steps; a run that fails is removed, so that it is tried again."""
    command = _command(recipe, name, folder, STEPS[recipe])
    try:
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder / "luyen" / name, ignore_errors=True)
        raise


def kill_in_step(folder: Path, name: str, step: int) -> None:
    """Train the quickstart and kill it once the step is recorded."""
    command = _command("quickstart", name, folder, 200)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics = folder / "luyen" / name / "metrics.jsonl"
    deadline = time.monotonic() + 1800
    lines = 0
    while lines <= step and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        lines = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
    is_going_on = process.poll() is None
    process.kill()
    process.wait()
    if lines <= step or not is_going_on:
        shutil.rmtree(folder / "luyen" / name, ignore_errors=True)
        raise SystemExit(f"{name}: {lines} lines of metrics, but more than {step} are wanted")


def damage(run: Path) -> None:
    """Overwrite the middle of the metrics, and cut a file of rollouts."""
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes()
    half = len(whole) // 2
    metrics.write_bytes(whole[:half] + b"\x00\xff no JSON\n" + whole[half + 300 :])
    rollouts = sorted((run / "rollouts").glob("*.parquet"))[1]
    rollouts.write_bytes(rollouts.read_bytes()[:100])


HOSTILE = (
    "<img src=x onerror='document.title=`pwned`'><script>document.title='pwned'</script>"
    "<a href='javascript:alert(1)'>x</a> \x00\x1b[31m \u202egnp.exe\u202c {{7*7}} ${7*7} `x`"
)
LONG = "a very long line " * 600_000
CONFIG = """\
trainer: {stage: rl, total_training_steps: 1, experiment_name: "<b>hostile</b>"}
algorithm: {adv_estimator: grpo}
actor_rollout_ref: {model: {path: 'builtin://arithmetic'}}
"""


def write_hostile(root: Path) -> None:
    """A run whose texts are markup, control characters, direction marks and 10 MB of one line."""
    run = RunDirectory.create(root, config=CONFIG, provenance={}, manifest={})
    values = {"reward/mean": 0.5, "judging/requests": 2.0, HOSTILE[:60]: 1.0}
    run.metrics.write_text(metrics_line(1, values))
    call = ToolCall(turn=0, name=HOSTILE[:80], arguments={HOSTILE: HOSTILE}, result=LONG,
                    status=CallStatus.FAILED, error=HOSTILE)  # fmt: skip
    told = Score(name="clear", value=0.7, seconds=1.5, reply=f"{HOSTILE} Score: 7")
    lost = Score(name="<i>kind</i>", value=None, error=HOSTILE, reply=HOSTILE)
    score = Score(name="reward", value=0.7, parts=(told, lost))
    one, other = rollout(1, reward=0.0), rollout(1, sample=1, reward=1.0)
    rows = [
        replace(one, rollout=replace(one.rollout, text=HOSTILE, score=score, calls=(call,))),
        replace(other, rollout=replace(other.rollout, text=LONG, fault=f"{HOSTILE}\nmore")),
    ]
    write_rollouts(run.rollouts(1), rows, step=1)


def main(folder: Path) -> None:
    """Make what is missing below the folder."""
    runs = folder / "luyen"
    for recipe, name in (("quickstart", "quickstart"), ("tool_calling", "tools")):
        if not (runs / name).exists():
            train(recipe, name, folder)
    if not (runs / "killed").exists():
        kill_in_step(folder, "killed", 3)
    if not (runs / "damaged").exists():
        shutil.copytree(runs / "quickstart", runs / "damaged")
        damage(runs / "damaged")
    if not (runs / "hostile").exists():
        write_hostile(runs / "hostile")
    broken = runs / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "manifest.json").write_text(json.dumps({"format": 1})[:-3])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
