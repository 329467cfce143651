"""A configuration that a check accepted is taken to its first optimizer step, in this process."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from luyen.config import check as checking
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.train.loop import train_online
from luyen.train.offline.loop import train_offline
from luyen.train.offline.start import prepare_offline
from luyen.train.start import prepare_online
from tests.fuzz.accepted import Case, case

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of some configurations."""

    tried: int
    """Configurations that were checked."""
    accepted: int
    """Those that the check accepted and one process can run."""
    wrong: tuple[str, ...]
    """Those of them that training refused or that it broke off with an error."""


def run_cases(count: int, folder: Path, *, first: int = 0) -> Outcome:
    """Take cases from `first` on until so many were accepted; each is then run."""
    wrong: list[str] = []
    accepted, number = 0, first
    with _quickly():
        while accepted < count:
            one = case(number)
            report = checked(one, folder / str(number))
            number += 1
            if not report.is_sound or report.plan.where.runtime != "local":
                continue
            accepted += 1
            try:
                take_first_step(report)
            except Exception as error:  # noqa: BLE001 whatever it is, the check did not say so
                wrong.append(f"{type(error).__name__}: {error}\n    {one}")
            shutil.rmtree(folder / str(number - 1), ignore_errors=True)
    return Outcome(tried=number - first, accepted=accepted, wrong=tuple(wrong))


def checked(one: Case, folder: Path) -> Report:
    """What a check says of a case whose files would lie in a folder."""
    words = [*one.words, f"trainer.default_local_dir={folder}"]
    return check([], words, machine=LAPTOP, versions=_version_of)


_version_of = cache(checking.version_of)


def take_first_step(report: Report) -> None:
    """Prepare the run and let it learn once; nothing is left open."""
    with ExitStack() as opened:
        if report.config.trainer.stage != "rl":
            offline = prepare_offline(report)
            opened.callback(offline.recorder.close)
            offline.limit(1)
            train_offline(offline)
            return
        run = prepare_online(report)
        for part in (run.recorder, run.reward, run.roles):
            opened.callback(part.close)
        run.limit(1)
        train_online(run)


@contextmanager
def _quickly() -> Iterator[None]:
    """Warnings are left aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
