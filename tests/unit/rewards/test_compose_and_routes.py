"""Weighted sums, and which of them judges a row."""

from itertools import permutations

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.config.reward_components import read_components
from luyen.rewards.build import build_reward
from luyen.rewards.tree import combined, total, with_part
from tests.optional import needs
from tests.unit.rewards.builders import config, group, own, prompt, scored, scores

PARTS = {
    "right": {"rule": "numeric", "weight": 2.0},
    "brief": {"rule": "length", "weight": 0.5},
    "shape": {"rule": "json"},
}
NEVER = {"by": "b", "at_least": 2.0, "below": 1.0}


def test_a_sum_shows_every_component_with_its_weight():
    [score] = scores(config(components=PARTS), prompt("12", "anything"), "12", longest=8)
    assert score.value == 2.0 * 1.0 + 0.5 * (-4 / 8) + 1.0
    assert [(p.name, p.weight, p.value) for p in score.parts] == [
        ("right", 2.0, 1.0),
        ("brief", 0.5, -0.5),
        ("shape", 1.0, 1.0),
    ]


def test_a_fault_of_one_component_is_a_fault_of_the_total():
    [score] = scores(config(components=PARTS), prompt("twelve", "anything"), "12")
    assert score.value is None
    assert score.error == "right: the row's ground truth 'twelve' is not a number"
    assert [part.value for part in score.parts] == [None, -0.25, 1.0]


def test_a_sum_beyond_all_bounds_is_a_fault():
    huge = Score(name="a", value=1e308, weight=10.0)
    assert total([huge]).error == "the sum is not finite"


@pytest.mark.parametrize("values", [(1e308, 1e308), (1e308 * 10, -1e308 * 10)])
def test_sums_that_no_float_holds_are_faults(values):
    parts = [Score(name=str(value), value=value) for value in values]
    assert total(parts).error == "the sum is not finite"


HUGE = "def compute_score(solution_str, **given): return {'score': 1.0, 'x': eval(solution_str)}"


@pytest.mark.parametrize("huge", ["1e19", "-1e308"])
def test_a_score_that_fp32_could_not_square_is_a_fault_with_its_number(huge, tmp_path):
    settings = config(custom_reward_function=own(tmp_path / "huge.py", HUGE))
    plain, lost = scores(settings, prompt(), "0.5", huge)
    assert plain.value == 1.0
    assert lost.value is None
    assert lost.error is not None
    assert f"{float(huge):g} lies beyond 1e+18" in lost.error


@pytest.mark.parametrize("combine", ["sum", "gdpo"])
def test_a_component_beyond_all_bounds_is_a_fault_however_it_is_combined(combine):
    huge = {"rule": "exact", "scale": 1e300}
    settings = config(components={"a": huge, "b": {"rule": "exact"}}, combine=combine)
    right, wrong = scores(settings, prompt("12"), "12", "13")
    assert right.error is not None
    assert "a: a score of 1e+300 lies beyond 1e+18" in right.error
    assert wrong.value is not None


@pytest.mark.parametrize("weights", [(0.6, 0.3, 0.1), (0.7, 0.2, 0.1), (0.8, 0.1, 0.1)])
def test_the_order_of_parts_changes_no_bit_of_a_sum(weights):
    parts = [Score(name=str(w), value=1.0, weight=w) for w in weights]
    assert {total(some).value for some in permutations(parts)} == {1.0}


@pytest.mark.parametrize("combine", ["sum", "lexicographic"])
def test_whoever_is_perfect_reaches_a_bar_of_1(combine):
    split = {n: {"rule": "exact", "weight": w} for n, w in (("a", 0.01), ("b", -0.93), ("c", 1.92))}
    gate = {"gate": {"by": "right"}} if combine == "sum" else {}
    components = {"right": {"parts": split}, "style": {"rule": "exact", **gate}}
    [score] = scores(config(combine=combine, components=components), prompt("12"), "12")
    assert score.parts[0].value == 0.9999999999999999
    assert not score.parts[1].gated


@pytest.mark.parametrize("how", ["sum", "gdpo", "lexicographic", "product", "min"])
def test_a_part_joins_by_how_a_tree_was_made_and_not_by_its_numbers(how):
    shapes = set[tuple[str, ...]]()
    for one, other in [(0.0, 0.0), (2.0, 2.0), (1.0, 0.0), (1.0, 1.0)]:
        root = combined([Score(name="a", value=one), Score(name="b", value=other)], how=how)
        made = with_part(root, Score(name="overlong", value=-0.5))
        assert made.value == (root.value or 0.0) - 0.5
        shapes.add(tuple(made.flat()))
    assert len(shapes) == 1


def test_a_part_is_added_to_a_tree_and_to_a_bare_score():
    more = Score(name="overlong", value=-0.5)
    assert with_part(Score(name="reward", value=1.0), more).flat() == {
        "reward": 0.5,
        "reward/score": 1.0,
        "reward/overlong": -0.5,
    }
    lost = Score(name="reward", value=None, error="late")
    assert with_part(lost, more).error == "score: late"


@pytest.mark.parametrize(
    ("source", "rule"),
    [("arithmetic/sum", "exact"), ("arithmetic", "exact"), ("openai/gsm8k", "gsm8k")],
)
def test_known_sources_have_a_rule(source, rule):
    [score] = scores(config(), prompt("12", source), "12")
    assert [part.name for part in score.parts] == [rule]


@needs("math_verify")
@pytest.mark.parametrize("source", ["math_dapo", "HuggingFaceH4/MATH-500", "aime_2024"])
def test_mathematics_goes_to_the_verifier(source):
    [score] = scores(config(num_workers=1), prompt("12", source), r"$\frac{24}{2}$")
    assert score.flat() == {"reward": 1.0, "reward/math": 1.0}


def test_routes_come_first_and_may_name_components_and_rules():
    components = {"right": {"rule": "numeric", "weight": 3.0}}
    settings = config(
        components=components, routes={"mine/*": ["right", "json"], "arithmetic/*": "numeric"}
    )
    groups = [
        group(prompt("12", "mine/a"), "12"),
        group(prompt("12", "arithmetic/sum"), "so 12", draw=1),
        group(prompt("12", "openai/gsm8k"), "#### 12", draw=2),
    ]
    found = [one.scores[0].flat() for one in scored(settings, groups)]
    assert found == [
        {"reward": 4.0, "reward/right": 3.0 / 3, "reward/json": 1.0},
        {"reward": 1.0, "reward/numeric": 1.0},
        {"reward": 1.0, "reward/gsm8k": 1.0},
    ]


def test_a_source_without_a_route_is_an_error_and_never_zero():
    with pytest.raises(UserError) as caught:
        scored(
            config(), [group(prompt("12", "arithmetic/sum"), "12"), group(prompt("1", "mine"), "1")]
        )
    message = str(caught.value)
    assert message.startswith("data_source = 'mine': no reward judges rows of this source")
    for word in ("arithmetic/*", "openai/gsm8k", "reward.routes", "reward.components"):
        assert word in message


def test_rows_without_a_source_need_a_reward_for_all_rows():
    with build_reward(config(), max_response_length=8) as reward:
        with pytest.raises(UserError, match="rows lack the column") as caught:
            reward.check_sources([""])
        assert "reward.components.answer.rule=exact" in caught.value.fix


def test_sources_are_checked_before_anything_is_sampled():
    with build_reward(config(), max_response_length=8) as reward:
        reward.check_sources(["arithmetic/sum", "openai/gsm8k"])
        with pytest.raises(UserError, match="'mine, yours'"):
            reward.check_sources(["mine", "arithmetic/sum", "yours", "mine"])


def test_names_are_those_of_the_components():
    with build_reward(config(components=PARTS), max_response_length=8) as reward:
        assert reward.names == ("right", "brief", "shape")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"components": {"a": {"rule": "exat"}}}, "did you mean `exact`"),
        ({"components": {"a": {"rule": "exact", "kwargs": {"stirp": 1}}}}, "did you mean `strip`"),
        ({"components": {"a": {"rule": "regex"}}}, "needs the hyperparameter `pattern`"),
        (
            {"components": {"a": {"weight": 1.0}}},
            "`a`: it has exactly one of rule, judge, model and parts",
        ),
        ({"components": {"a": "exact"}}, "`a`: expected {rule: RULE"),
        ({"components": {"a/b": {"rule": "exact"}}}, "holds no `/`"),
        ({"components": {"a\nb": {"rule": "exact"}}}, "no control characters"),
        ({"routes": {"*": ["exat"]}}, "did you mean `exact`"),
        ({"components": {"a": {"parts": {"b": {"weight": 1}}}}}, "`a/b`: it has exactly one of"),
        ({"components": {"a": {"parts": {"b/c": {"rule": "exact"}}}}}, "`b/c`: a name is not"),
        ({"components": {"a": {"parts": {}}}}, "`a`: parts: there is none"),
        ({"components": {"a": {"parts": {"b": {"rul": "x"}}}}}, "`a`: parts.b.rul: Extra inputs"),
        ({"components": {"a": {"rule": "exact", "parts": PARTS}}}, "exactly one of rule, judge"),
        ({"components": {"a": {"parts": PARTS, "kwargs": {"b": 1}}}}, "arguments of a rule"),
        ({"components": {"a": {"rule": "exact", "combine": "min"}}}, "combine is about parts"),
        ({"components": {"a": {"rule": "exact", "floor": 2, "ceiling": 1}}}, "above ceiling 1"),
        ({"components": {"a": {"rule": "exact", "gate": NEVER}}}, "no value is at least 2 and bel"),
        ({"components": {"a": {"rule": "exact", "gate": {"by": "b"}}}}, "gates of a look at no"),
        ({"components": {"a": {"model": "reward_model"}}}, "asks for the learned reward, and"),
    ],
)
def test_a_component_that_is_wrong_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        scores(config(**keys), prompt("12"), "12")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("luyen.rewards.leaf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'luyen\[math\]'"):
        scores(config(), prompt("12", "math_x"), "12")


def test_weights_are_numbers():
    _, wrong = read_components(config(components={"a": {"rule": "exact", "weight": "much"}}))
    assert wrong == ["`a`: weight: Input should be a valid number"]
