"""The page of metrics, from the declarations of every module; run as a script, it prints it."""

import sys
from collections.abc import Iterable

from luyen.telemetry.metrics import CATALOG, Metric
from tests.architecture.tree import modules

_INTRODUCTION = """# Metrics

Every number that a run writes to `metrics.jsonl` and to the other sinks, with the module that
emits it. The page is made from the declarations in the code by `make docs`.

A part in angle brackets stands for a name: `<component>` for one part between slashes, `<path...>`
for one or more. Names that begin with `time/` depend on the clock; all others depend on the run's
configuration and seed alone, so two runs can be compared with those aside.
"""


def metrics_page(metrics: Iterable[Metric]) -> str:
    """The documentation page: one table for each first part of the names."""
    sections: dict[str, list[str]] = {}
    for found in metrics:
        row = f"| `{found.name}` | {found.unit} | {found.doc} | `{found.owner}` |"
        sections.setdefault(found.name.split("/")[0], []).append(row)
    head = ["| metric | unit | meaning | emitted by |", "|---|---|---|---|"]
    tables = ["\n".join([f"## {name}", "", *head, *rows]) for name, rows in sections.items()]
    return "\n\n".join([_INTRODUCTION.rstrip(), *tables]) + "\n"


def current_page() -> str:
    """What `docs/metrics.md` should say: importing a module declares the metrics it emits."""
    assert list(modules()), "importing every module fills the catalog"
    return metrics_page(CATALOG.all(prefix="luyen."))


if __name__ == "__main__":
    sys.stdout.write(current_page())
