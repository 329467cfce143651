"""The built-in model taught to judge, in a run as short as it can be."""

from pathlib import Path

from luyen.pipeline.export import export_checkpoint
from luyen.telemetry.metrics import read_metrics
from luyen.train.start import run_training
from tests.runs import report_of

CONFIG = """\
data: {train_batch_size: 32, max_prompt_length: 32, max_response_length: 48}
actor_rollout_ref:
  model: {enable_gradient_checkpointing: false}
  actor: {optim: {lr: 2.0e-3}}
trainer: {stage: reward_model, logger: jsonl, test_freq: -1, experiment_name: run}
"""


def taught(folder: Path, rows: str, *words: str, steps: int) -> tuple[str, dict[str, float]]:
    """The exported model, and what was measured at the end on rows that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "judge.yaml"
    config.write_text(CONFIG)
    report = report_of(
        folder,
        f"data.train_files={rows}&size={32 * steps}",
        f"data.val_files={rows}&split=held-out&size=96",
        f"trainer.total_training_steps={steps}",
        *words,
        files=[config],
    )
    assert report.is_sound, report.problems
    run_training(report)
    root = folder / "luyen" / "run"
    export_checkpoint(str(root), folder / "exported", merge=None)
    last = read_metrics(root / "metrics.jsonl")[-1]
    return str(folder / "exported"), last.timeless()
