"""The key of an endpoint: it is sent, and never seen again."""

import asyncio
import base64
import json
import urllib.parse
from typing import Any

import pytest

from luyen.base import api_endpoint
from luyen.base.http import Response
from luyen.base.records import Score
from luyen.config.schema.reward import JudgeConfig
from luyen.rewards.calls import InlineExecutor, ScoringCounters
from luyen.rewards.llm_judge.judge_reward import JudgeFactory
from tests.unit.rewards.builders import prompt, rollout

KEY = "sk-SECRET/+12345"


def asked() -> Score:
    judges = JudgeFactory(
        own=None, executor=InlineExecutor(timeout_s=1.0), cache=None, counts=ScoringCounters()
    )
    block = JudgeConfig(
        base_url="http://h/v1",
        prompt="{answer}",
        scale=(0.0, 10.0),
        retries=0,
        api_key_env="JUDGE_KEY",
    )
    return asyncio.run(judges.judge(block)(prompt(), [rollout("x")]))[0]


@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize("pad", [0, 150])
def test_a_key_that_a_server_repeats_is_replaced(monkeypatch, status, pad):
    monkeypatch.setenv("JUDGE_KEY", "sk-SECRET/12345")

    async def answered(*_: Any, **__: Any) -> Response:
        body = json.dumps({"error": {"message": "." * pad + "no: sk-SECRET/12345"}})
        return Response(status=status, headers={}, body=body.replace("/", "\\/").encode())

    monkeypatch.setattr(api_endpoint, "send", answered)
    score = asked()
    assert "SECRET" not in (score.error or "SECRET")


def test_a_short_word_for_a_key_stays_in_replies(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "7")

    async def answered(*_: Any, **__: Any) -> Response:
        body = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]})
        return Response(status=200, headers={}, body=body.encode())

    monkeypatch.setattr(api_endpoint, "send", answered)
    score = asked()
    assert score.value == 0.7


@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize(
    "spelled",
    [
        "".join(f"\\u{ord(letter):04x}" for letter in KEY),
        urllib.parse.quote(KEY, safe=""),
        base64.b64encode(KEY.encode()).decode(),
    ],
)
def test_a_key_in_another_spelling_is_replaced(monkeypatch, spelled, status):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def answered(*_: Any, **__: Any) -> Response:
        said = f'{{"message": {{"content": "no: {spelled}"}}}}'
        body = f'{{"error": "no: {spelled}", "choices": [{said}]}}'
        return Response(status=status, headers={}, body=body.encode())

    monkeypatch.setattr(api_endpoint, "send", answered)
    error = asked().error or KEY
    assert "(the key)" in error
    assert KEY not in error
    assert spelled not in error


def test_a_date_beyond_all_calendars_is_no_time_to_wait(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def answered(*_: Any, **__: Any) -> Response:
        late = {"retry-after": "Fri, 31 Dec 99999999999 23:59:59 GMT"}
        return Response(status=429, headers=late, body=b"")

    monkeypatch.setattr(api_endpoint, "send", answered)
    assert "judge http_429" in (asked().error or "")
