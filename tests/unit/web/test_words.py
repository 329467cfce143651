"""Sentences of the server that the page translates are the sentences that the server writes."""

import inspect
import json
import re
from typing import Any

import pytest

from luyen.studio.doctor.diagnose import RULES
from luyen.studio.screens import overview
from luyen.studio.screens.rollout_view import MISSING, why_zero
from tests.architecture.tree import ROOT

WORDS = (ROOT / "web/src/i18n/told.ts").read_text()
KNOWN = {json.loads(f'"{key}"') for key in re.findall(r'^  "((?:[^"\\]|\\.)*)":', WORDS, re.M)}
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
"""The pattern of `told.ts`."""


def _row(advantage: float | None, reward: float | None, fault: str | None = None) -> dict[str, Any]:
    return {"advantage": advantage, "reward": reward, "fault": fault}


LEFT_OUT = _row(None, 0.0), _row(None, 1.0)
REASONS = [
    why_zero(mine, rows, is_used=is_used, fault=fault, split=split)
    for mine, rows, is_used, fault, split in (
        (_row(None, 1.0), (), False, None, "validation"),
        (_row(0.0, 0.5), (_row(0.0, 0.5), _row(0.0, 0.5)), True, None, "train"),
        (_row(0.0, -1e-9), (_row(0.0, -1e-9), _row(0.0, -1e-9)), True, None, "train"),
        (_row(None, None, "x"), (_row(None, None, "x"), *LEFT_OUT), False, "x", "train"),
        (_row(None, 0.0), LEFT_OUT, False, None, "train"),
        (_row(None, None), (_row(1.0, 1.0), _row(None, None)), False, "x", "train"),
        (_row(None, 0.0), (_row(1.0, 1.0), _row(None, 0.0)), False, None, "train"),
        (_row(0.0, 0.0), (_row(1.0, 1.0), _row(0.0, 0.0)), True, None, "train"),
    )
]


def test_every_reason_of_an_advantage_of_0_is_met():
    assert None not in REASONS
    assert len({NUMBER.sub("{}", str(one)) for one in REASONS}) == 7


@pytest.mark.parametrize(
    "sentence",
    [
        *(rule.title for rule in RULES.values()),
        *MISSING.values(),
        *(str(one) for one in REASONS),
    ],
)
def test_the_page_has_the_sentence_in_vietnamese(sentence: str):
    assert NUMBER.sub("{}", sentence) in KNOWN


def test_the_page_has_the_verdict_of_a_run_without_a_step():
    sentence = "The run has not finished a step."
    assert sentence in KNOWN
    assert sentence in inspect.getsource(overview)


def test_a_translation_has_the_numbers_of_its_sentence():
    pairs = re.findall(r'^  "((?:[^"\\]|\\.)*)":\s+"((?:[^"\\]|\\.)*)",$', WORDS, re.M)
    assert len(pairs) == len(KNOWN) > 40
    assert [key for key, text in pairs if key.count("{}") != text.count("{}")] == []
