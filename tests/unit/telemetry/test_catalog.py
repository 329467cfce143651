"""A metric is declared once, by the code that emits it, and found by its name."""

import pytest

from luyen.base.errors import UserError
from luyen.telemetry import spans
from luyen.telemetry.metrics import CATALOG, Catalog, UncataloguedMetric
from tests.architecture.metrics_page import metrics_page


def catalog() -> Catalog:
    made = Catalog()
    made.declare("reward/mean", doc="Mean reward.", owner="luyen.train.reward")
    made.declare("reward/<component>/mean", doc="Of a component.", owner="luyen.train.reward")
    made.declare("val/<source...>/pass@<k>", unit="1", doc="Any right.", owner="luyen.train.val")
    return made


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format/mean", "reward/<component>/mean"),
        ("reward/a/b/mean", None),
        ("reward//mean", None),
        ("val/gsm8k/pass@4", "val/<source...>/pass@<k>"),
        ("val/math/algebra/pass@16", "val/<source...>/pass@<k>"),
        ("val/pass@16", None),
        ("rewardXmean", None),
    ],
)
def test_a_name_is_covered_by_itself_or_by_its_family(name: str, declared: str | None):
    found = catalog().find(name)
    assert (None if found is None else found.name) == declared


def test_an_undeclared_name_fails_under_the_tests_and_warns_once_elsewhere():
    made = catalog()
    with pytest.raises(UncataloguedMetric, match="'reward/median' is not in the catalog"):
        made.warn_of_missing(["reward/mean", "reward/median"])
    made.warn_of_missing(["reward/median"])
    assert made.missing(["reward/median", "reward/mean"]) == ["reward/median"]


def test_a_second_meaning_is_refused_and_the_same_one_is_not():
    made = catalog()
    made.declare("reward/mean", doc="Mean reward.", owner="a.plugin")
    with pytest.raises(UserError, match=r"luyen\.train\.reward declared it"):
        made.declare("reward/mean", doc="Median reward.")


def test_a_declaration_knows_its_module():
    made = Catalog()
    made.declare("x/y", doc="Z.")
    assert [m.owner for m in made.all()] == [__name__]
    assert made.all(prefix="luyen.") == ()
    by_span = CATALOG.find("time/generate")
    assert by_span is not None
    assert by_span.owner == spans.__name__


def test_the_page_has_a_table_for_each_family():
    page = metrics_page(catalog().all())
    assert page.count("\n## ") == 2
    assert "| `val/<source...>/pass@<k>` | 1 | Any right. | `luyen.train.val` |" in page
    assert page.index("`reward/<component>/mean`") < page.index("`reward/mean`")
