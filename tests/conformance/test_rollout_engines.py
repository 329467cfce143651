"""What every rollout engine does, whatever it is made of."""

import bisect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from luyen.base.errors import UserError
from luyen.base.seeds import uniform
from luyen.rollout.protocol import (
    Request,
    RolloutEngine,
    StreamingEngine,
    TokenStream,
    generate,
)
from luyen.rollout.servers.engine import ServerEngine
from tests.generation import (
    ENGINES,
    Ladder,
    engine_of,
    packed_logps,
    pairs,
    plain_logits,
    request,
    sampled_logps,
    spell,
)
from tests.peers.engines import SERVERS, served_engine
from tests.tiny_models import VOCABULARY, tiny_policy

POLICY = tiny_policy("llama", initializer_range=0.15)
LENGTHS = (1, 5, 33)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RolloutEngine]]:
    """Engines over servers, each started once and used by every test."""
    with ExitStack() as stack:
        known: dict[str, RolloutEngine] = {}

        def find(name: str) -> RolloutEngine:
            if name not in known:
                folder = tmp_path_factory.mktemp(name)
                known[name] = stack.enter_context(served_engine(name, POLICY, folder))[0]
            return known[name]

        yield find


@pytest.fixture(params=(*ENGINES, *SERVERS))
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    if request.param in SERVERS:
        return request.getfixturevalue("served")(request.param)
    return engine_of(request.param, POLICY)


@pytest.fixture(params=ENGINES)
def own_engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Engines whose random numbers and truncation are ours."""
    return engine_of(request.param, POLICY)


@pytest.fixture(params=SERVERS)
def server_engine(
    request: pytest.FixtureRequest, served: Callable[[str], RolloutEngine]
) -> RolloutEngine:
    return served(request.param)


def probabilities(asked: Request, tokens: tuple[int, ...], temperature: float) -> list[list[float]]:
    """float64 distribution of each drawn token, from the model's own forward."""
    logits = plain_logits(POLICY, asked.tokens + tokens)[len(asked.tokens) - 1 : -1]
    return torch.softmax(logits / temperature, -1).tolist()


def is_unscaled(engine: RolloutEngine) -> bool:
    """Whether it is over an endpoint that reports log-probabilities before the temperature."""
    return isinstance(engine, ServerEngine) and engine.name == "openai"


def by_hand(weights: list[float], number: float) -> int:
    """First index whose running sum exceeds `number` x total."""
    running = list(itertools.accumulate(weights))
    return bisect.bisect_right(running, number * running[-1])


def test_greedy_takes_the_likeliest_token_of_a_plain_forward(engine: RolloutEngine):
    asked = [request(n, 12, temperature=0.0, samples=2) for n in LENGTHS]
    found = generate(engine, asked)
    assert len(found) == 6
    for before, done in pairs(asked, found):
        logits = plain_logits(POLICY, before + done.tokens)[len(before) - 1 : -1]
        assert done.tokens == tuple(logits.argmax(-1).tolist())
        assert done.reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.9])
def test_log_probabilities_are_those_of_a_plain_forward(engine: RolloutEngine, temperature: float):
    asked = [request(n, 12, temperature=temperature) for n in LENGTHS]
    if is_unscaled(engine) and temperature not in (0.0, 1.0):
        with pytest.raises(UserError, match="before the temperature"):
            engine.submit(asked[0])
        return
    answers = pairs(asked, generate(engine, asked))
    scale = temperature or 1.0
    for before, done in answers:
        logits = plain_logits(POLICY, before + done.tokens)[len(before) - 1 : -1] / scale
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert torch.tensor(done.logps).double().sub(expected).abs().max() < 1e-5
    gap = (packed_logps(POLICY, answers, temperature=scale) - sampled_logps(answers)).abs().max()
    assert gap < 1e-5
    # The paged engine promises bits on a GPU only, where it is the embedded one.
    if isinstance(engine, type(engine_of("native", POLICY))):
        assert gap == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_tokens_follow_the_counter_numbers(own_engine: RolloutEngine, temperature: float):
    asked = [request(n, 40, samples=3, temperature=temperature) for n in LENGTHS]
    seen = set()
    for (name, sample), done in generate(own_engine, asked).items():
        one = next(r for r in asked if r.id == name)
        for place, weights in enumerate(probabilities(one, done.tokens, temperature)):
            assert done.tokens[place] == by_hand(weights, uniform(one.keys[sample], place))
        seen |= set(done.tokens)
    assert len(seen) > 20
    assert max(seen) < VOCABULARY


TRUNCATIONS = [
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.3},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 1.4},
    {"top_p": 0.8, "min_p": 0.4},
]


def kept_by_hand(weights: list[float], *, top_k=-1, top_p=1.0, min_p=0.0) -> set[int]:
    """vLLM's order: min-p, then top-k, then top-p of what is left."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= min_p * weights[order[0]]]
    order = order[:top_k] if top_k > 0 else order
    total = sum(weights[i] for i in order)
    kept, mass = set(), 0.0
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.add(i)
        mass += weights[i]
    return kept


@pytest.mark.parametrize("limits", TRUNCATIONS, ids=str)
def test_truncation_draws_from_the_support_and_reports_its_mass(own_engine: RolloutEngine, limits):
    asked = [request(n, 30, samples=2, **limits) for n in LENGTHS]
    temperature = limits.get("temperature", 1.0)
    rules = {k: v for k, v in limits.items() if k != "temperature"}
    for (name, sample), done in generate(own_engine, asked).items():
        one = next(r for r in asked if r.id == name)
        for place, weights in enumerate(probabilities(one, done.tokens, temperature)):
            kept = kept_by_hand(weights, **rules)
            masked = [w if i in kept else 0.0 for i, w in enumerate(weights)]
            assert done.tokens[place] == by_hand(masked, uniform(one.keys[sample], place))
            assert done.kept_mass[place] == pytest.approx(sum(masked), abs=1e-5)
            # The log-probability is that of the full softmax, whatever was ruled out.
            expected = torch.tensor(weights[done.tokens[place]]).log()
            assert done.logps[place] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_no_stop_token_is_drawn_before_the_least_length(own_engine: RolloutEngine, limits):
    stops, floor = frozenset(range(0, VOCABULARY, 2)), 9
    rules = {k: v for k, v in limits.items() if k != "temperature"}
    asked = [request(n, 30, samples=2, **limits, stop_ids=stops) for n in LENGTHS]
    free = generate(own_engine, asked)
    assert min(len(done.tokens) for done in free.values()) < floor
    asked = [replace(r, sampling=replace(r.sampling, min_new_tokens=floor)) for r in asked]
    for (name, sample), done in generate(own_engine, asked).items():
        one = next(r for r in asked if r.id == name)
        assert not stops.intersection(done.tokens[:floor])
        assert len(done.tokens) > floor
        assert done.tokens[-1] in stops or len(done.tokens) == 30
        for place, weights in enumerate(probabilities(one, done.tokens, 1.0)):
            left = [0.0 if place < floor and i in stops else w for i, w in enumerate(weights)]
            kept = kept_by_hand(left, **rules)
            left = [w if i in kept else 0.0 for i, w in enumerate(left)]
            number = uniform(one.keys[sample], place)
            drawn = left.index(max(left)) if "temperature" in limits else by_hand(left, number)
            assert done.tokens[place] == drawn
            assert done.kept_mass[place] == pytest.approx(sum(left), abs=1e-5)
            expected = torch.tensor(weights[drawn]).log()
            assert done.logps[place] == pytest.approx(float(expected), abs=1e-4)


def test_who_has_a_least_length_changes_nothing_for_others(own_engine: RolloutEngine):
    alone = generate(own_engine, [request(n, 14, samples=2) for n in LENGTHS])
    early = request(9, 14, name="early", stop_ids=frozenset({3, 4}), min_new_tokens=12)
    among = generate(own_engine, [early, *(request(n, 14, samples=2) for n in LENGTHS)])
    for key, done in alone.items():
        assert (among[key].tokens, among[key].kept_mass) == (done.tokens, ())


def test_a_stop_string_before_the_least_length_is_passed_over(own_engine: RolloutEngine):
    [whole] = generate(own_engine, [request(5, 60)]).values()
    text = spell(whole.tokens)
    first, later = text[3:5], text[40:42]
    asked = request(5, 60, stop_strings=(first, later), min_new_tokens=10)
    [done] = generate(own_engine, [asked]).values()
    ends = [i + 2 for i in range(len(text)) if text[i : i + 2] in (first, later) and i + 2 > 10]
    assert (done.tokens, done.reason) == (whole.tokens[: ends[0]], "stop")


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"min_new_tokens": 2, "stop_ids": {3}}],
    ids=str,
)
def test_a_server_refuses_truncation(server_engine: RolloutEngine, limits):
    with pytest.raises(UserError, match="full softmax"):
        server_engine.submit(request(5, 6, **limits))
    assert server_engine.is_idle


@pytest.mark.parametrize("option", ["constraint", "top_logprobs"])
def test_a_server_refuses_an_option_that_it_does_not_have(server_engine: RolloutEngine, option):
    plain = request(5, 6)
    asked = {
        "constraint": replace(plain, constraint=LADDER),
        "top_logprobs": replace(plain, sampling=replace(plain.sampling, top_logprobs=2)),
    }
    with pytest.raises(UserError, match=option):
        server_engine.submit(asked[option])
    assert server_engine.is_idle


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_likeliest_tokens_are_those_of_a_plain_forward(own_engine: RolloutEngine, temperature):
    asked = [
        request(n, 9, samples=2, temperature=temperature, top_logprobs=top)
        for n, top in zip(LENGTHS, (1, 5, 20), strict=True)
    ]
    found = generate(own_engine, asked)
    for (name, _), done in found.items():
        one = next(r for r in asked if r.id == name)
        assert len(done.top_logps) == len(done.tokens) == 9
        for place, weights in enumerate(probabilities(one, done.tokens, temperature or 1.0)):
            top = done.top_logps[place]
            best = sorted(weights, reverse=True)[: one.sampling.top_logprobs]
            assert [logp for _, logp in top] == pytest.approx(
                [float(torch.tensor(p).log()) for p in best], abs=1e-4
            )
            assert [weights[token] for token, _ in top] == pytest.approx(best, abs=1e-6)
            assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))
            # One convention: where the sampled token is among them, both say the same.
            assert dict(top).get(done.tokens[place], done.logps[place]) == done.logps[place]


def test_alternatives_change_nothing_that_is_sampled(own_engine: RolloutEngine):
    plain = [request(n, 14, samples=2) for n in LENGTHS]
    told = [replace(r, sampling=replace(r.sampling, top_logprobs=4)) for r in plain]
    for (_, one), (_, other) in zip(
        generate(own_engine, plain).items(), generate(own_engine, told).items(), strict=True
    ):
        assert (one.tokens, one.logps, one.top_logps) == (other.tokens, other.logps, ())


LADDER = Ladder(VOCABULARY)
CONSTRAINED = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 2, "temperature": 1.5}]


@pytest.mark.parametrize("sampling", CONSTRAINED, ids=str)
def test_a_constrained_answer_takes_allowed_tokens_alone(own_engine: RolloutEngine, sampling):
    asked = [
        replace(request(n, 30, samples=3, stop_ids=frozenset({9}), **sampling), constraint=LADDER)
        for n in LENGTHS
    ]
    temperature = sampling.get("temperature", 1.0)
    rules = {k: v for k, v in sampling.items() if k != "temperature"}
    ends = set()
    for (name, sample), done in generate(own_engine, asked).items():
        one = next(r for r in asked if r.id == name)
        state = LADDER.start()
        for place, weights in enumerate(probabilities(one, done.tokens, temperature or 1.0)):
            left = [w if ok else 0.0 for w, ok in zip(weights, state.allowed(), strict=True)]
            kept = kept_by_hand(left, **rules)
            left = [w if i in kept else 0.0 for i, w in enumerate(left)]
            number = uniform(one.keys[sample], place)
            wanted = by_hand(left, number) if temperature else left.index(max(left))
            assert done.tokens[place] == wanted
            assert done.kept_mass[place] == pytest.approx(sum(left), abs=1e-5)
            # The log-probability is that of the full softmax.
            assert done.logps[place] == pytest.approx(
                float(torch.tensor(weights[wanted]).log()), abs=1e-4
            )
            state.accept(done.tokens[place])
        assert state.is_finished
        assert done.reason == "stop"
        ends.add(len(done.tokens))
    assert min(ends) >= 5
    assert len(ends) > 1 or not temperature


def test_constrained_and_other_rows_do_not_touch_one_another(own_engine: RolloutEngine):
    plain = [request(n, 14, samples=2) for n in LENGTHS]
    ruled = [
        replace(request(n, 14, name=f"c{n}", top_logprobs=n % 4), constraint=LADDER) for n in (3, 8)
    ]
    alone = {**generate(own_engine, plain), **generate(own_engine, ruled[:1])}
    among = generate(own_engine, [ruled[0], *plain, ruled[1]])
    for key, done in alone.items():
        assert among[key].tokens == done.tokens
        assert among[key].kept_mass == pytest.approx(done.kept_mass, abs=1e-6)
    assert all(among[r.id, 0].reason == "stop" for r in ruled)


class Stuck:
    """A constraint that no token continues after the third."""

    def start(self):
        return self._state()

    @staticmethod
    def _state():
        state = Ladder(VOCABULARY).start()
        whole = state.allowed
        state.allowed = lambda: whole() & torch.tensor(len(state.tokens) < 3)
        return state


def test_an_answer_that_no_token_continues_is_aborted(own_engine: RolloutEngine):
    asked = replace(request(5, 30, samples=2), constraint=Stuck())
    for done in generate(own_engine, [asked]).values():
        assert (len(done.tokens), done.reason) == (3, "aborted")


def test_a_constrained_answer_may_run_out_of_room(own_engine: RolloutEngine):
    [done] = generate(own_engine, [replace(request(5, 3), constraint=LADDER)]).values()
    assert (len(done.tokens), done.reason) == (3, "length")


@pytest.mark.parametrize("name", ["native", "paged"])
def test_a_running_sample_shows_what_its_completion_begins_with(name: str):
    engine = engine_of(name, POLICY)
    assert isinstance(engine, StreamingEngine)
    asked = [
        request(5, 40, samples=2, top_logprobs=2),
        replace(request(6, 40, name="c"), constraint=Ladder(VOCABULARY, steps=30)),
        request(33, 40, name="plain"),
    ]
    wanted = generate(engine, asked)
    assert engine.snapshot("plain", 0) is None
    for one in asked:
        engine.submit(one)
    assert engine.snapshot("c", 0) == TokenStream(tokens=(), logps=())
    seen: dict[tuple[str, int], list[int]] = {key: [] for key in wanted}
    found = {}
    while not engine.is_idle:
        found |= {(done.request, done.sample): done for done in engine.advance()}
        for (one, sample), whole in wanted.items():
            stream = engine.snapshot(one, sample, start=3)
            assert (stream is None) == ((one, sample) in found)
            if stream is not None:
                upto = slice(3, 3 + len(stream.tokens))
                assert stream == TokenStream(
                    tokens=whole.tokens[upto],
                    logps=whole.logps[upto],
                    top_logps=whole.top_logps[upto],
                )
                seen[one, sample].append(len(stream.tokens))
    assert found == wanted
    del seen["c", 0]  # it may end early
    assert all(max(lengths) > 5 and len(set(lengths)) > 2 for lengths in seen.values())


def test_kept_mass_is_absent_without_truncation(engine: RolloutEngine):
    [done] = generate(engine, [request(4, 3)]).values()
    assert done.kept_mass == ()


def test_a_stop_id_ends_the_answer_and_is_kept(engine: RolloutEngine):
    [whole] = generate(engine, [request(5, 20)]).values()
    stop = whole.tokens[7]
    first = whole.tokens.index(stop)
    [done] = generate(engine, [request(5, 20, stop_ids=frozenset({stop}))]).values()
    assert (done.tokens, done.reason) == (whole.tokens[: first + 1], "stop")
    assert done.logps == whole.logps[: first + 1]


def test_a_stop_string_ends_the_answer_where_it_is_complete(engine: RolloutEngine):
    [whole] = generate(engine, [request(5, 60)]).values()
    text = spell(whole.tokens)
    stop = text[40:43]
    end = text.index(stop) + 3
    [done] = generate(engine, [request(5, 60, stop_strings=("not there", stop))]).values()
    assert (done.tokens, done.reason) == (whole.tokens[:end], "stop")


def test_ignore_stop_draws_every_token(engine: RolloutEngine):
    [whole] = generate(engine, [request(5, 20)]).values()
    stops = frozenset(whole.tokens)
    asked = request(5, 20, stop_ids=stops, stop_strings=(spell(whole.tokens[:1]),))
    [short] = generate(engine, [asked]).values()
    assert len(short.tokens) == 1
    ignored = replace(asked, sampling=replace(asked.sampling, ignore_stop=True))
    [long] = generate(engine, [ignored]).values()
    assert (long.tokens, long.reason) == (whole.tokens, "length")


def test_a_stop_at_the_last_token_counts_as_a_stop(engine: RolloutEngine):
    tried = [request(5, 6, seed=seed) for seed in range(20)]
    answers = ((asked, next(iter(generate(engine, [asked]).values()))) for asked in tried)
    asked, whole = next((a, w) for a, w in answers if w.tokens[-1] not in w.tokens[:-1])
    stopped = replace(asked.sampling, stop_ids=frozenset({whole.tokens[-1]}))
    [done] = generate(engine, [replace(asked, sampling=stopped)]).values()
    assert (len(done.tokens), done.reason) == (6, "stop")


def test_samples_share_the_prompt_and_nothing_else(engine: RolloutEngine):
    asked = request(7, 16, samples=4)
    together = generate(engine, [asked])
    assert len({done.tokens for done in together.values()}) == 4
    for i, key in enumerate(asked.keys):
        [alone] = generate(engine, [replace(asked, keys=(key,))]).values()
        assert together[asked.id, i].tokens == alone.tokens


def test_equal_keys_give_equal_answers(engine: RolloutEngine):
    asked = request(7, 16)
    doubled = replace(asked, keys=asked.keys * 2)
    first, second = generate(engine, [doubled]).values()
    assert (first.tokens, first.logps) == (second.tokens, second.logps)


def test_abort_gives_what_there_is_and_leaves_the_others_alone(engine: RolloutEngine):
    kept, dropped = request(5, 10, name="kept"), request(6, 10, name="dropped", samples=2)
    [expected] = generate(engine, [kept]).values()
    engine.submit(kept)
    engine.submit(dropped)
    aborted = engine.abort("dropped")
    assert [(d.sample, d.reason, d.tokens) for d in aborted] == [
        (0, "aborted", ()),
        (1, "aborted", ()),
    ]
    assert engine.abort("unknown") == []
    found = [done for _ in range(20) for done in engine.advance()]
    while isinstance(engine, ServerEngine) and not engine.is_idle:
        found += engine.advance()
    assert found == [expected]
    assert engine.is_idle
    assert engine.advance() == []


def test_close_forgets_and_the_engine_can_be_used_again(engine: RolloutEngine):
    engine.submit(request(5, 4))
    engine.close()
    assert engine.is_idle
    assert len(generate(engine, [request(6, 4)])) == 1


IMPOSSIBLE = [
    ({"tokens": ()}, {}, "at least one token"),
    ({"tokens": (VOCABULARY,)}, {}, "ids go from 0 to 60"),
    ({"tokens": (-1,)}, {}, "ids go from 0 to 60"),
    ({"keys": ()}, {}, "random key"),
    ({}, {"max_new_tokens": 0}, "at least one token"),
    ({}, {"temperature": -1.0}, "0 (greedy) or more"),
    ({}, {"temperature": float("nan")}, "0 (greedy) or more"),
    ({}, {"top_p": 0.0}, "share of the probability"),
    ({}, {"top_k": -2}, "number of tokens"),
    ({}, {"min_p": 1.5}, "relative to the likeliest"),
    ({}, {"min_new_tokens": -1}, "number of tokens"),
    ({}, {"min_new_tokens": 1, "stop_ids": frozenset(range(VOCABULARY))}, "no token to begin"),
    ({}, {"stop_strings": ("",)}, "ends every answer"),
    ({}, {"top_logprobs": 21}, "at most 20"),
    ({}, {"top_logprobs": -1}, "at most 20"),
    ({"constraint": Ladder(VOCABULARY)}, {"ignore_stop": True}, "where an answer ends"),
    ({"constraint": Ladder(VOCABULARY)}, {"min_new_tokens": 2}, "where an answer ends"),
    ({"constraint": Ladder(VOCABULARY - 1)}, {}, "the model has 61"),
]


@pytest.mark.parametrize(("changes", "sampling", "why"), IMPOSSIBLE, ids=str)
def test_an_impossible_request_is_refused(engine: RolloutEngine, changes, sampling, why: str):
    good = request(3, 4)
    bad = replace(good, **changes, sampling=replace(good.sampling, **sampling))
    with pytest.raises(UserError) as caught:
        engine.submit(bad)
    assert why in str(caught.value)
    assert engine.is_idle


def test_two_requests_of_one_name_are_a_mistake(engine: RolloutEngine):
    with pytest.raises(AssertionError, match="share an id"):
        generate(engine, [request(3, 4), request(3, 5)])
