"""The page of metrics is made from the declarations, and nothing declared is missing from it."""

from luyen.telemetry.metrics import CATALOG
from tests.architecture.metrics_page import current_page
from tests.architecture.tree import ROOT


def test_the_page_of_metrics_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text() == current_page(), "run `make docs`"


def test_every_metric_has_a_meaning_in_one_sentence():
    metrics = CATALOG.all(prefix="luyen.")
    assert metrics
    assert [m.name for m in metrics if not m.doc.endswith(".") or "\n" in m.doc] == []
