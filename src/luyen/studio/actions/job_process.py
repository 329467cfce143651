"""The process of a job: `python -m luyen.studio.actions.job_process FOLDER ID`.

It is the `luyen` command itself, in a session of its own, so that it goes on when the studio ends.
Before anything is loaded it notes its process id, and at the end its exit code: a studio that is
started later finds both.
"""

import runpy
import sys
from pathlib import Path

from luyen.studio.actions.job_files import JobFiles


def main(runs: str, job_id: str) -> int:
    """Run the command of a job; returns its exit code."""
    files = JobFiles(Path(runs))
    record = files.read(job_id)
    if record is None or not files.has_config_of(record):
        sys.stderr.write("error: the job or its configuration is not as it was written\n")
        return 1
    files.note_process(job_id)
    sys.argv = ["luyen", *record.words]
    code = 1
    try:
        runpy.run_module("luyen", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        files.note_exit(job_id, code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
