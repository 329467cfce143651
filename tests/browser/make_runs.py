"""A folder of runs for the walk through the studio: finished, with tools, killed and damaged.

`python -m tests.browser.make_runs FOLDER` trains them; what is there already is kept.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

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
    """Train a recipe for a few steps."""
    command = _command(recipe, name, folder, STEPS[recipe])
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def kill_in_step(folder: Path, name: str, step: int) -> None:
    """Train the quickstart and kill it once the step is recorded."""
    command = _command("quickstart", name, folder, 200)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics = folder / "luyen" / name / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_bytes().splitlines()) > step:
            break
        time.sleep(0.2)
    assert process.poll() is None, f"the run {name} ended before step {step}"
    process.kill()
    process.wait()


def damage(run: Path) -> None:
    """Overwrite the middle of the metrics, and cut a file of rollouts."""
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes()
    half = len(whole) // 2
    metrics.write_bytes(whole[:half] + b"\x00\xff no JSON\n" + whole[half + 300 :])
    rollouts = sorted((run / "rollouts").glob("*.parquet"))[1]
    rollouts.write_bytes(rollouts.read_bytes()[:100])


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
    broken = runs / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "manifest.json").write_text(json.dumps({"format": 1})[:-3])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
