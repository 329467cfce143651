"""What a finished stage hands on: its newest checkpoint as a Hugging Face directory."""

import shutil
from pathlib import Path

from luyen.telemetry.artifact_registry import made_at
from luyen.train.exported import export_checkpoint


def export_stage(run: Path, folder: Path) -> str:
    """Write the model of a run into `folder`, and give its title; an adapter is merged.

    What a killed process left there is made again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # This process has just written the run's configuration, which is the caller's.
    export_checkpoint(str(run), folder, merge=None, is_trusted=True)
    made = made_at(folder)
    assert made is not None, "an export of a run is noted"
    return f"{made.title}  {folder}"
