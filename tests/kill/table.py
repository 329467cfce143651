"""`python -m tests.kill.table [offline] [ray] [answers] [small] [short] [STALENESS...]`: kill runs
at every point, on a cluster or here, and print which went on as they should. Offline: runs that
learn from given rows, on a cluster with two ranks. Answers: without conversations. Small: with one
rank and one replica, and only the controller is killed; in short: once at each point.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kill.cases import Case, Killing, ahead_cases, all_cases, offline_cases
from tests.kill.on_ray import SMALL, WORDS, on_ray, ray_cases, ray_offline_cases
from tests.kill.zygote import Zygote


def main(words: Sequence[str]) -> int:
    """Carry a whole matrix out; how many cases failed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        staleness = [int(word) for word in words if word.isdigit()]
        if "ray" in words:
            with on_ray(root, SMALL if "small" in words else WORDS) as kill:
                ways = {f"is_{word}": word in words for word in ("short", "small")}
                shape = "single-turn" if "answers" in words else "tool-calling"
                cases = ray_cases(staleness or [0], shape=shape, **ways)
                cases = ray_offline_cases() if "offline" in words else cases
                return _table(cases, kill, root)
        with Zygote() as zygote:
            killing = Killing(zygote, root)
            cases = ahead_cases(staleness) if staleness else all_cases()
            cases = offline_cases() if "offline" in words else cases
            return _table(cases, killing.carry_out, root)


def _table(cases: Sequence[Case], kill: Callable[[Case, Path], object], root: Path) -> int:
    done: dict[tuple[str, str], list[bool]] = {}
    started = time.monotonic()
    for number, case in enumerate(cases):
        minutes = (time.monotonic() - started) / 60
        sys.stderr.write(f"\r{number + 1}/{len(cases)} {minutes:.0f} min {case}".ljust(120)[:120])
        held = _holds(kill, case, root / f"case{number}")
        done.setdefault((case.point, _column(case)), []).append(held)
    sys.stderr.write("\n")
    columns = list(dict.fromkeys(map(_column, cases)))
    print(f"| killed when | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for point in dict.fromkeys(case.point for case in cases):
        cells = [_cell(done.get((point, column))) for column in columns]
        print(f"| {point} | {' | '.join(cells)} |")
    results = [held for row in done.values() for held in row]
    print(f"\n{sum(results)} of {len(results)} runs went on as if nothing had happened.")
    return len(results) - sum(results)


def _column(case: Case) -> str:
    ahead = f", staleness {case.staleness}" if case.staleness else ""
    return f"{case.shape}, {case.algorithm}{ahead}"


def _holds(kill: Callable[[Case, Path], object], case: Case, place: Path) -> bool:
    place.mkdir()
    try:
        kill(case, place)
    except AssertionError as error:
        sys.stderr.write(f"\n{case}: {error}\n")
        return False
    return True


def _cell(results: list[bool] | None) -> str:
    return "" if results is None else f"{sum(results)}/{len(results)}"


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
