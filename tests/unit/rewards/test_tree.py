"""The reward tree: gates, clips, ways to combine, and sources that see a whole step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from luyen.algorithms.advantages.grouping import Grouping, centred, group_std
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.build import build_reward
from luyen.rewards.protocol import Group, Services
from luyen.rewards.scoring import VALIDATION, ScoreJournal
from luyen.rewards.tree import turn_shares
from tests.unit.rewards import tree_rules
from tests.unit.rewards.builders import config, group, prompt, scored, scores

RIGHT = {"rule": "exact"}


@pytest.fixture(autouse=True)
def seen() -> list[tuple[int, str]]:
    """The calls of `test_number`: which column of which answer."""
    tree_rules.SEEN.clear()
    return tree_rules.SEEN


def number(column: int, **keys: Any) -> dict[str, Any]:
    lost = {"lost": keys.pop("lost")} if "lost" in keys else {}
    return {"rule": "test_number", "kwargs": {"column": column, **lost}, **keys}


def judged(components: dict[str, Any], *texts: str, **keys: Any) -> list[Score]:
    return scores(config(components=components, **keys), prompt("", "mine"), *texts)


def part(score: Score, name: str) -> Score:
    return next(one for one in score.parts if one.name == name)


def test_a_closed_gate_is_not_judged_and_says_so(seen):
    parts = {"style": number(1, gate={"by": "right"}, weight=0.5), "right": number(0)}
    good, bad = judged(parts, "1 3", "0 7")
    assert good.value == 2.5
    assert not part(good, "style").gated
    assert bad.value == 0.0
    assert part(bad, "style") == Score(name="style", value=0.0, weight=0.5, gated=True)
    assert (1, "0 7") not in seen
    assert [p.name for p in good.parts] == ["style", "right"]  # as written, not as judged


@pytest.mark.parametrize(
    ("gate", "values"),
    [
        ({"at_least": 0.5}, [-9.0, 5.0, 5.0]),
        ({"below": 0.5}, [5.0, -9.0, -9.0]),
        ({"at_least": 0.5, "below": 1.0}, [-9.0, 5.0, -9.0]),
        ({}, [-9.0, -9.0, 5.0]),
    ],
)
def test_a_gate_is_open_between_its_bars(gate, values):
    parts = {
        "right": number(0, weight=0.0),
        "style": number(1, gate={"by": "right", "otherwise": -9.0, **gate}),
    }
    assert [s.value for s in judged(parts, "0 5", "0.5 5", "1 5")] == values


def test_a_gate_whose_sibling_failed_is_neither_open_nor_closed(seen):
    parts = {"right": number(0, lost="x"), "style": number(1, gate={"by": "right"})}
    [score] = judged(parts, "1 2 x")
    assert score.value is None
    assert part(score, "style").error == "not judged, because `right` has no value"
    assert score.error == "right: lost; style: not judged, because `right` has no value"
    assert (1, "1 2 x") not in seen


def test_a_fault_behind_a_closed_gate_does_not_happen():
    parts = {"right": number(0), "judge": number(1, lost="x", gate={"by": "right"})}
    closed, opened = judged(parts, "0 2 x", "1 2 x")
    assert closed.value == 0.0
    assert opened.value is None


@pytest.mark.parametrize(
    ("keys", "value", "raw"),
    [
        ({}, 3.0, None),
        ({"ceiling": 2.0}, 2.0, 3.0),
        ({"floor": 4.0}, 4.0, 3.0),
        ({"scale": -1.0, "shift": 0.5}, -2.5, 3.0),
        ({"scale": 2.0, "ceiling": 5.0}, 5.0, 3.0),
        ({"floor": -1.0, "ceiling": 9.0}, 3.0, None),
    ],
)
def test_values_are_scaled_shifted_then_clipped_and_stay_visible(keys, value, raw):
    [score] = judged({"a": number(0, weight=2.0, **keys)}, "3")
    assert (part(score, "a").value, part(score, "a").raw) == (value, raw)
    assert score.value == 2 * value


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({}, [(0, 1.0), (1, 2.0)]),
        ({"scale": 0.5}, [(0, 0.5), (1, 1.0)]),
        ({"ceiling": 2.0}, [(0, 0.5), (1, 1.0)]),  # half of it is left
        ({"floor": 8.0}, [(0, 0.0), (1, 0.0)]),  # what was added is nobody's
        ({"scale": -1.0, "floor": -1.0}, [(0, -0.25), (1, -0.5)]),
    ],
)
def test_turns_keep_their_part_of_what_is_left(keys, shares):
    [score] = judged({"a": {"rule": "test_turns", **keys}}, "x")
    assert list(turn_shares(score)) == shares


@pytest.mark.parametrize(
    ("combine", "value"), [("sum", 8.0), ("product", 12.0), ("min", 2.0), ("lexicographic", 8.0)]
)
def test_subtrees_are_combined_as_they_say(combine, value):
    style = {"parts": {"a": number(0), "b": number(1, weight=2.0)}, "combine": combine}
    [score] = judged({"style": {**style, "weight": 0.5}, "shown": number(2, weight=0.0)}, "2 3 9")
    assert part(score, "style").value == value
    assert part(score, "style").combine == combine
    assert score.value == value / 2
    assert score.flat()["reward/style/b"] == 3.0


def test_a_part_of_weight_0_is_shown_but_not_multiplied():
    parts = {"a": number(0), "b": number(1, weight=0.0)}
    assert judged(parts, "2 3", combine="product")[0].value == 2.0
    assert judged(parts, "2 -3", combine="min")[0].value == 2.0


def test_a_product_gives_nothing_to_turns():
    [score] = judged({"a": {"rule": "test_turns"}, "b": number(0)}, "3", combine="product")
    assert score.value == 12.0
    assert list(turn_shares(score)) == [(0, 0.0), (1, 0.0)]


@pytest.mark.parametrize("combine", ["sum", "product", "min", "gdpo", "lexicographic"])
def test_a_part_without_value_leaves_the_whole_without(combine):
    sound, lost = judged(
        {"a": number(0), "b": number(1, lost="x")}, "1 1", "1 1 x", combine=combine
    )
    assert sound.value is not None
    assert (lost.value, lost.error) == (None, "b: lost")


def test_lexicographic_counts_what_comes_first(seen):
    parts = {"safe": number(0), "right": number(1, bar=0.5), "brief": number(2)}
    texts = ["0 1 1", "1 0.25 1", "1 0.5 0.75"]
    found = judged(parts, *texts, combine="lexicographic")
    assert [s.value for s in found] == [0.0, 1.25, 2.25]
    assert [[p.gated for p in s.parts] for s in found] == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]
    assert [text for column, text in seen if column == 2] == ["1 0.5 0.75"]


def test_gdpo_is_what_the_estimator_computes_before_whitening():
    rows = [(0.0, 2.0), (1.0, 2.5), (1.0, -4.0), (0.0, 7.0)]
    parts = {"a": number(0, weight=2.0), "b": number(1, weight=0.5)}
    found = judged(parts, *[f"{a} {b}" for a, b in rows], combine="gdpo")
    grouping = Grouping.of(torch.zeros(4, dtype=torch.long))
    wanted = torch.zeros(4, dtype=torch.double)
    for column, weight in ((0, 2.0), (1, 0.5)):
        x = torch.tensor([row[column] for row in rows], dtype=torch.double)
        wanted += weight * centred(x, grouping) / (group_std(x, grouping) + 1e-6)
    assert [s.value for s in found] == pytest.approx(wanted.tolist(), rel=1e-12)
    assert [p.raw for s in found for p in s.parts] == [value for row in rows for value in row]
    assert {s.combine for s in found} == {"gdpo"}


def test_gdpo_of_one_and_of_equals_is_exactly_0():
    parts = {"a": number(0), "b": number(0, weight=3.0)}
    assert [s.value for s in judged(parts, "0.1", combine="gdpo")] == [0.0]
    assert [s.value for s in judged(parts, *["0.1"] * 7, combine="gdpo")] == [0.0] * 7


def test_gdpo_compares_only_rollouts_that_have_every_part():
    parts = {"a": number(0), "b": number(1, lost="x")}
    with_fault = judged(parts, "0 1", "4 9 x", "1 2", combine="gdpo")
    without = judged(parts, "0 1", "1 2", combine="gdpo")
    assert [with_fault[0], with_fault[2]] == without


def test_a_validation_is_not_normalised():
    settings = config(components={"a": number(0), "b": number(1)}, combine="gdpo")
    with build_reward(settings, max_response_length=16) as reward:
        groups = [group(prompt("", "mine"), "1 2", "3 4")]
        plain = reward.score(groups, ScoreJournal(purpose=VALIDATION))
        trained = reward.score(groups, ScoreJournal())
    assert [s.value for s in plain[0].scores] == [3.0, 7.0]
    assert sum(s.value or 0.0 for s in trained[0].scores) == pytest.approx(0.0)


class Learned:
    """A stand-in for a learned reward: the length of the text, and NaN for an empty one."""

    names = ("learned",)

    def __init__(self) -> None:
        self.steps: list[list[list[str]]] = []

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        return (await self.score_step([(prompt, rollouts)]))[0]

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        self.steps.append([[r.text for r in rollouts] for _, rollouts in groups])
        return [[_length(r.text) for r in rollouts] for _, rollouts in groups]


def _length(text: str) -> Score:
    return Score(name="learned", value=float(len(text)) if text else float("nan"))


MODEL = {"model": "reward_model"}


def learned(settings: dict[str, Any], groups: Sequence[Any]) -> tuple[Learned, list[list[Score]]]:
    model = Learned()
    services = Services(model=model)
    built = build_reward(config(**settings), max_response_length=16, services=services)
    with built as reward:
        found = reward.score(groups)
    return model, [list(one.scores) for one in found]


def test_a_learned_reward_sees_a_whole_step_once_and_only_what_counts():
    settings = {
        "components": {"right": RIGHT, "taste": {**MODEL, "gate": {"by": "right"}, "weight": 0.1}}
    }
    groups = [group(prompt("12"), "12", "1"), group(prompt("7"), "1"), group(prompt("13"), "13")]
    model, rows = learned(settings, groups)
    assert model.steps == [[["12"], ["13"]]]
    assert [[s.value for s in row] for row in rows] == [[1.2, 0.0], [0.0], [1.2]]


@pytest.mark.parametrize("manager", ["naive", "dapo", "prime"])
def test_every_manager_keeps_the_step_together_and_each_route_its_own(manager):
    settings = {
        "components": {"taste": MODEL, "right": RIGHT},
        "routes": {"a": ["taste"], "b": ["right"], "c": ["taste", "right"]},
        "reward_manager": {"name": manager},
        "overlong_buffer": {"enable": manager == "dapo", "len": 4},
    }
    texts = ["aa", "bbb", "cccc", "a"]
    sources = ["a", "b", "c", "a"]
    groups = [group(prompt("bbb", s), t) for s, t in zip(sources, texts, strict=True)]
    model, rows = learned(settings, groups)
    assert sorted(model.steps) == [[["aa"], ["a"]], [["cccc"]]]
    assert [row[0].value for row in rows] == [2.0, 1.0, 4.0, 1.0]
    assert [part.name for part in rows[0][0].parts][-1] == (
        "overlong" if manager == "dapo" else "taste"
    )


def test_a_learned_reward_that_is_on_judges_alone():
    _, rows = learned({"reward_model": {"enable": True}}, [group(prompt("", "any"), "abc")])
    assert rows[0][0].flat() == {"reward": 3.0, "reward/reward_model": 3.0}


def test_what_is_not_finite_is_a_fault_not_a_score():
    _, rows = learned({"components": {"taste": MODEL}}, [group(prompt("", "any"), "", "ab")])
    assert (rows[0][0].value, rows[0][0].error) == (
        None,
        "taste: nan was judged: not a finite value",
    )
    assert rows[0][1].value == 2.0


def test_dapo_adds_to_a_tree_that_is_no_sum():
    settings = config(
        components={"a": number(0), "b": number(1)},
        combine="product",
        reward_manager={"name": "dapo"},
        overlong_buffer={"enable": True, "len": 4},
    )
    [done] = scored(settings, [group(prompt("", "mine"), "2 3")], longest=6)
    assert done.scores[0].flat() == {
        "reward": 5.5,
        "reward/score": 6.0,
        "reward/score/a": 2.0,
        "reward/score/b": 3.0,
        "reward/overlong": -0.5,
    }


def test_every_part_says_how_long_it_took():
    [score] = judged({"a": number(0), "deep": {"parts": {"b": number(1)}}}, "1 2")
    assert part(score, "a").seconds is not None
    assert part(part(score, "deep"), "b").seconds is not None
