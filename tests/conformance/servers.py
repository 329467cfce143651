"""What every engine over a server does: subclass the suite, and give it an engine and its policy.

A server has random numbers and arithmetic of its own, so tokens are not compared with those of the
embedded engine. What it says of its tokens is compared with the policy's own forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.models.policy import Policy
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, generate
from tests.generation import plain_logits

LENGTHS = (1, 5, 33)
Decode = Callable[[Sequence[int]], str]


def request(
    policy: Policy, length: int, new: int, *, name: str = "", samples: int = 1, **sampling
) -> Request:
    """Answers to random tokens of the policy's vocabulary."""
    name = name or f"r{length}"
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, policy.head.vocabulary, (length,), generator=generator).tolist()
    keys = tuple(derive_key(0, "test", name, i) for i in range(samples))
    asked = Sampling(max_new_tokens=new, **sampling)
    return Request(id=name, tokens=tuple(tokens), keys=keys, sampling=asked)


def gap(policy: Policy, asked: Request, done: Completion) -> float:
    """Largest difference of a completion's log-probabilities from the model's own forward."""
    logits = plain_logits(policy, asked.tokens + done.tokens)[len(asked.tokens) - 1 : -1]
    scaled = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1)
    expected = scaled.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    return float((torch.tensor(done.logps).double() - expected).abs().max())


class ServerEngineSuite:
    """Fixtures: `engine`, whose server is warm, `policy`, whose weights it has, and `decode`."""

    tolerance: ClassVar[float] = 1e-3

    def test_greedy_takes_the_likeliest_token(self, engine: RolloutEngine, policy: Policy):
        asked = [request(policy, n, 12, temperature=0.0, samples=2) for n in LENGTHS]
        found = generate(engine, asked)
        assert len(found) == 6
        for (name, _), done in found.items():
            one = next(r for r in asked if r.id == name)
            logits = plain_logits(policy, one.tokens + done.tokens)[len(one.tokens) - 1 : -1]
            assert done.tokens == tuple(logits.argmax(-1).tolist())
            assert done.reason == "length"
            assert gap(policy, one, done) < self.tolerance

    @pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.9])
    def test_log_probabilities_are_those_of_the_scaled_softmax(
        self, engine: RolloutEngine, policy: Policy, temperature: float
    ):
        asked = [request(policy, n, 12, temperature=temperature, samples=4) for n in LENGTHS]
        for (name, _), done in generate(engine, asked).items():
            one = next(r for r in asked if r.id == name)
            assert len(done.tokens) == 12
            assert gap(policy, one, done) < self.tolerance
            assert done.kept_mass == ()

    def test_tokens_follow_the_softmax(self, engine: RolloutEngine, policy: Policy):
        asked = request(policy, 5, 1, samples=600)
        probabilities = plain_logits(policy, asked.tokens)[-1].softmax(-1)
        drawn = torch.tensor([done.tokens[0] for done in generate(engine, [asked]).values()])
        counts = torch.bincount(drawn, minlength=policy.head.vocabulary).double()
        likely = probabilities > 0.02
        assert likely.sum() >= 2
        spread = (600 * probabilities * (1 - probabilities)).sqrt()
        assert ((counts - 600 * probabilities).abs()[likely] < 5 * spread[likely]).all()

    def test_a_stop_id_ends_the_answer_and_is_kept(self, engine: RolloutEngine, policy: Policy):
        [whole] = generate(engine, [request(policy, 5, 20, temperature=0.0)]).values()
        stop = whole.tokens[min(7, len(set(whole.tokens)))]
        first = whole.tokens.index(stop)
        asked = request(policy, 5, 20, temperature=0.0, stop_ids=frozenset({stop}))
        [done] = generate(engine, [asked]).values()
        assert (done.tokens, done.reason) == (whole.tokens[: first + 1], "stop")

    def test_a_stop_string_ends_the_answer_where_it_is_complete(
        self, engine: RolloutEngine, policy: Policy, decode: Decode
    ):
        [whole] = generate(engine, [request(policy, 5, 24, temperature=0.0)]).values()
        text = decode(whole.tokens)
        stop = text[3:6]
        ends = [n for n in range(1, 25) if stop in decode(whole.tokens[:n])]
        asked = request(policy, 5, 24, temperature=0.0, stop_strings=("not there", stop))
        [done] = generate(engine, [asked]).values()
        assert (done.tokens, done.reason) == (whole.tokens[: ends[0]], "stop")

    def test_ignore_stop_generates_every_token(self, engine: RolloutEngine, policy: Policy):
        [whole] = generate(engine, [request(policy, 5, 10, temperature=0.0)]).values()
        stops = frozenset(whole.tokens)
        asked = request(policy, 5, 10, temperature=0.0, stop_ids=stops)
        [short] = generate(engine, [asked]).values()
        assert len(short.tokens) == 1
        ignored = replace(asked, sampling=replace(asked.sampling, ignore_stop=True))
        [long] = generate(engine, [ignored]).values()
        assert (long.tokens, long.reason) == (whole.tokens, "length")

    def test_a_stop_at_the_last_token_counts_as_a_stop(self, engine: RolloutEngine, policy: Policy):
        [whole] = generate(engine, [request(policy, 5, 2, temperature=0.0)]).values()
        new = 1 if whole.tokens[0] == whole.tokens[1] else 2
        stops = frozenset({whole.tokens[new - 1]})
        asked = request(policy, 5, new, temperature=0.0, stop_ids=stops)
        [done] = generate(engine, [asked]).values()
        assert (len(done.tokens), done.reason) == (new, "stop")

    def test_samples_differ_and_a_key_repeats_its_sample(
        self, engine: RolloutEngine, policy: Policy
    ):
        asked = request(policy, 7, 16, samples=4)
        together = generate(engine, [asked])
        assert len({done.tokens for done in together.values()}) == 4
        doubled = replace(asked, keys=asked.keys[:1] * 2)
        first, second = generate(engine, [doubled]).values()
        assert first.tokens == second.tokens == together[asked.id, 0].tokens

    def test_abort_before_the_first_pass_gives_nothing(self, engine: RolloutEngine, policy: Policy):
        kept = request(policy, 5, 10, name="kept", temperature=0.0)
        [expected] = generate(engine, [kept]).values()
        engine.submit(kept)
        engine.submit(request(policy, 6, 10, name="dropped", samples=2))
        aborted = engine.abort("dropped")
        assert [(d.sample, d.reason, d.tokens) for d in aborted] == [
            (0, "aborted", ()),
            (1, "aborted", ()),
        ]
        assert engine.abort("unknown") == []
        found: list[Completion] = []
        while not engine.is_idle:
            found += engine.advance()
        assert [(d.tokens, d.reason) for d in found] == [(expected.tokens, expected.reason)]
        assert engine.advance() == []

    def test_abort_of_a_running_request_gives_what_there_is(
        self, engine: RolloutEngine, policy: Policy
    ):
        asked = request(policy, 3, 120, name="long", samples=2)
        engine.submit(asked)
        assert engine.advance() == []
        aborted = engine.abort("long", 0)
        assert [(d.request, d.sample, d.reason) for d in aborted] == [("long", 0, "aborted")]
        assert len(aborted[0].tokens) < 120
        if aborted[0].tokens:
            assert gap(policy, asked, aborted[0]) < self.tolerance
        found: list[Completion] = []
        while not engine.is_idle:
            found += engine.advance()
        assert [(d.sample, len(d.tokens)) for d in found] == [(1, 120)]

    @pytest.mark.parametrize(
        ("changes", "sampling", "why"),
        [
            ({"tokens": ()}, {}, "at least one token"),
            ({"tokens": (10**6,)}, {}, "ids go from 0 to"),
            ({"keys": ()}, {}, "random key"),
            ({}, {"max_new_tokens": 0}, "at least one token"),
            ({}, {"max_new_tokens": 10**5}, "max_model_len"),
            ({}, {"top_p": 0.5}, "full softmax"),
            ({}, {"top_k": 4}, "full softmax"),
            ({}, {"min_new_tokens": 2, "stop_ids": frozenset({1})}, "full softmax"),
        ],
        ids=str,
    )
    def test_an_impossible_request_is_refused(
        self, engine: RolloutEngine, policy: Policy, changes, sampling, why: str
    ):
        good = request(policy, 3, 4)
        bad = replace(good, **changes, sampling=replace(good.sampling, **sampling))
        with pytest.raises(UserError) as caught:
            engine.submit(bad)
        assert why in str(caught.value)
        assert engine.is_idle
