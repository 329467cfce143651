"""Every damage, read by everyone who uses the file: `python -m tests.fuzz.table`."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.damage import KINDS, all_damages
from tests.fuzz.readers import READERS, Benches, judge


def main() -> int:
    """Print the table; 1 when a reader gave a wrong result, 0 otherwise."""
    found: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    damages = all_damages()
    with tempfile.TemporaryDirectory() as folder, Benches(Path(folder)) as benches:
        for damage in damages:
            found[damage.kind, "damages"] += 1
            for reader in READERS[damage.kind]:
                try:
                    verdict = judge(benches.of(damage.shape), damage, reader)
                except AssertionError as error:
                    verdict = "wrong"
                    wrong.append(f"{damage}, {reader}: {error}")
                found[damage.kind, verdict] += 1
            sys.stderr.write(f"\r{damage.number + 1} of {len(damages)}")
    sys.stderr.write("\n")
    print("\n".join([*_lines(found), *wrong]))
    return 1 if wrong else 0


def _lines(found: Counter[tuple[str, str]]) -> list[str]:
    columns = ("damages", "named", "same", "wrong")
    lines = [f"| file | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(str(found[kind, name]) for name in columns)} |")
    sums = [str(sum(found[kind, name] for kind in KINDS)) for name in columns]
    return [*lines, f"| all | {' | '.join(sums)} |"]


if __name__ == "__main__":
    sys.exit(main())
