"""Questions become rollouts: what each record says of its tokens."""

import pytest

from luyen.base.records import GroupId, Source, StopReason, make_prompt
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.models.random_policy import random_policy
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest, sampling_key, submit_requests

TOKENIZER = load_tokenizer("builtin://arithmetic")
RENDERER = Renderer(TOKENIZER)
POLICY = random_policy()


def draws(*texts: str, samples: int = 3) -> list[PromptRequest]:
    prompts = [make_prompt([{"role": "user", "content": text}]) for text in texts]
    return [
        PromptRequest(group=GroupId(step=4, draw=i, uid=prompt.uid), prompt=prompt, samples=samples)
        for i, prompt in enumerate(prompts)
    ]


def ask(
    asked: list[PromptRequest],
    *,
    rows: int = 4,
    seed: int = 0,
    purpose: str = "rollout",
    **sampling,
):
    engine = NativeEngine(
        POLICY,
        max_model_len=128,
        max_num_seqs=rows,
        max_num_batched_tokens=256,
        decode=TOKENIZER.decode,
    )
    how = Sampling(**{"max_new_tokens": 6, **sampling})
    return submit_requests(engine, RENDERER, asked, how, seed=seed, purpose=purpose, version=9)()


def test_a_rollout_accounts_for_every_token():
    [asked] = draws("1+2=")
    [group] = ask([asked])
    before = tuple(RENDERER.prompt_tokens(asked.prompt.messages))
    for sample, rollout in enumerate(group.rollouts):
        assert rollout.tokens[: len(before)] == before
        assert rollout.prompt_length == len(before)
        assert (rollout.sample, rollout.group, rollout.response_length) == (sample, asked.group, 6)
        assert rollout.sources == (Source.PROMPT,) * len(before) + (Source.SAMPLED,) * 6
        assert rollout.logps[: len(before)] == (None,) * len(before)
        assert all(logp is not None and logp < 0 for logp in rollout.logps[len(before) :])
        assert rollout.versions == (None,) * len(before) + (9,) * 6
        assert rollout.turns == (0,) * len(rollout.tokens)
        assert rollout.stop == StopReason.TOKEN_BUDGET
        assert rollout.text == TOKENIZER.decode(rollout.tokens[len(before) :])


def test_groups_come_in_the_order_of_their_draws():
    asked = draws("1+2=", "30+4=", "5+66=", "7+8=")
    groups = ask(asked, rows=2)
    assert [group.prompt for group in groups] == [draw.prompt for draw in asked]
    assert groups == ask(asked, rows=16)
    assert list(reversed(groups)) == ask(list(reversed(asked)), rows=3)


def test_the_same_prompt_drawn_twice_gets_other_numbers():
    first, second = ask(draws("1+2=", "1+2="))
    texts = [{r.tokens for r in group.rollouts} for group in (first, second)]
    assert texts[0].isdisjoint(texts[1])
    assert len(texts[0]) == 3


@pytest.mark.parametrize("change", [{"seed": 1}, {"purpose": "validation"}])
def test_seed_and_purpose_are_part_of_the_address(change):
    asked = draws("1+2=")
    assert ask(asked) == ask(asked)
    assert ask(asked)[0].rollouts[0].tokens != ask(asked, **change)[0].rollouts[0].tokens


def test_the_address_of_a_turns_numbers():
    group = GroupId(step=4, draw=2, uid="u")
    assert sampling_key(7, "rollout", group, 3) == derive_key(7, "rollout", 4, 2, "u", 3, 0)
    assert sampling_key(7, "rollout", group, 3, turn=1) != sampling_key(7, "rollout", group, 3)


def test_a_stop_token_is_an_answer():
    [group] = ask(draws("1+2="), stop_ids=frozenset(range(128)))
    assert {r.stop for r in group.rollouts} == {StopReason.ANSWERED}
    assert {r.response_length for r in group.rollouts} == {1}
