"""What rows of `tools://` are taught with is what the tools of a run offer."""

import asyncio
import runpy

from luyen.data.tool_tasks import CALCULATOR, LOOKUP, price_of
from luyen.rollout.tools.builtin_tools import calculator_tool
from tests.architecture.tree import ROOT


def test_the_calculator_has_the_schema_of_the_rows():
    assert calculator_tool().schema == CALCULATOR


def test_the_price_list_has_the_schema_and_the_prices_of_the_rows():
    lookup = runpy.run_path(str(ROOT / "recipes/tools/orders.py"))["lookup"]
    assert lookup.schema == LOOKUP
    assert asyncio.run(lookup("4821")) == str(price_of("4821"))
