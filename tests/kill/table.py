"""`python -m tests.kill.table`: kill runs at every point and print which went on as they should."""

import sys
import tempfile
from pathlib import Path

from tests.kill.cases import ALGORITHMS, SHAPES, Case, Killing, all_cases
from tests.kill.points import POINTS
from tests.kill.zygote import Zygote


def main() -> int:
    """Carry the whole matrix out; how many cases failed."""
    columns = [(shape, algorithm) for shape in SHAPES for algorithm in ALGORITHMS]
    done: dict[tuple[str, str, str], list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder, Zygote() as zygote:
        root = Path(folder)
        killing = Killing(zygote, root)
        cases = all_cases()
        for number, case in enumerate(cases):
            sys.stderr.write(f"\r{number + 1}/{len(cases)} {case}".ljust(120)[:120])
            kind = (case.point, case.shape, case.algorithm)
            done.setdefault(kind, []).append(_holds(killing, case, root / f"case{number}"))
    sys.stderr.write("\n")
    heads = [f"{shape}, {algorithm}" for shape, algorithm in columns]
    print(f"| killed when | {' | '.join(heads)} |")
    print(f"|---|{'---|' * len(heads)}")
    for point in POINTS:
        cells = [_cell(done.get((point, *column))) for column in columns]
        print(f"| {point} | {' | '.join(cells)} |")
    results = [held for row in done.values() for held in row]
    print(f"\n{sum(results)} of {len(results)} runs went on as if nothing had happened.")
    return len(results) - sum(results)


def _holds(killing: Killing, case: Case, place: Path) -> bool:
    place.mkdir()
    try:
        killing.carry_out(case, place)
    except AssertionError as error:
        sys.stderr.write(f"\n{case}: {error}\n")
        return False
    return True


def _cell(results: list[bool] | None) -> str:
    return "" if results is None else f"{sum(results)}/{len(results)}"


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
