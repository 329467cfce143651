"""Turns that a stop string or a stop token of the configuration ends: nothing drawn is lost."""

import asyncio

from luyen.base.records import Source, StopReason
from luyen.rollout.multi_turn import FaultPolicy
from luyen.rollout.native.sequences import Row
from luyen.rollout.protocol import Request, Sampling
from luyen.rollout.single_turn import submit_requests
from luyen.rollout.tools.python_tools import tool
from tests.talk import TOKENIZER, ScriptedEngine, call, converse, draws, setting

CALL_END = TOKENIZER.markers["</tool_call>"]
RAW = 400


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def goes_on(text: str, key: int) -> str:
    """A policy that would write more after its call."""
    del key
    if "<tool_response>" not in text:
        return call("add", a=1, b=2) + "and so on<|im_end|>"
    return "3.END and more<|im_end|>"


class StoppingEngine(ScriptedEngine):
    """Ends a scripted line where the engines end an answer."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        for waiting in self._rows:
            row = Row(request, 0)
            for count, token in enumerate(waiting.tokens, start=1):
                row.append(token, -1.0, 1.0)
                if row.ending(lambda ids: TOKENIZER.decode(ids, skip_special=False)) is not None:
                    waiting.tokens = waiting.tokens[:count]
                    break

    def _completion(self, row, reason):
        return super()._completion(row, "stop" if reason == "length" else reason)


def played(sampling: Sampling):
    how = setting([add])
    [group] = asyncio.run(
        converse(
            StoppingEngine(goes_on),
            how,
            draws(how, "1+2="),
            sampling,
            seed=0,
            purpose="rollout",
            version=0,
            policy=FaultPolicy(on_fault="fail"),
        )
    )
    return group.rollouts[0]


def sampled(rollout) -> str:
    own = [t for t, s in zip(rollout.tokens, rollout.sources, strict=True) if s == Source.SAMPLED]
    return TOKENIZER.decode(own, skip_special=False)


def test_a_turn_that_stops_at_its_call_is_read_with_the_stop_and_closed_by_the_template():
    stops = TOKENIZER.stop_ids
    by_text = Sampling(
        max_new_tokens=RAW, stop_ids=stops, stop_strings=("</tool_call>", "END"), min_p=0.0
    )
    by_token = Sampling(max_new_tokens=RAW, stop_ids=stops | {CALL_END}, stop_strings=("END",))
    for sampling in (by_text, by_token):
        rollout = played(sampling)
        assert rollout.fault is None
        assert rollout.stop is StopReason.ANSWERED
        assert [c.result for c in rollout.calls] == ["3"]
        assert sampled(rollout) == call("add", a=1, b=2) + "3.END"
        assert rollout.text == "3.END"
        kinds = [logp is not None for logp in rollout.logps]
        assert kinds == [source == Source.SAMPLED for source in rollout.sources]
        whole = TOKENIZER.decode(rollout.tokens, skip_special=False)
        assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>3" in whole


def test_an_answer_keeps_its_stop_string_and_every_token_up_to_it():
    how = setting()
    sampling = Sampling(max_new_tokens=RAW, stop_ids=TOKENIZER.stop_ids, stop_strings=("END",))
    [group] = submit_requests(
        StoppingEngine(goes_on),
        how.renderer,
        draws(how, "<tool_response>"),
        sampling,
        seed=0,
        purpose="rollout",
        version=0,
    )()
    [rollout] = group.rollouts
    assert (rollout.text, rollout.stop) == ("3.END", StopReason.ANSWERED)
    assert rollout.response_length == len(TOKENIZER.encode("3.END"))
