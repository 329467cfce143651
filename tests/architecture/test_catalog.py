"""What `check` knows about the algorithms is what the algorithms are."""

from collections.abc import Iterable, Mapping

from luyen.config.catalog import ADV_ESTIMATORS, POLICY_LOSSES
from luyen.config.plugins import ENVIRONMENTS, TOOL_FORMATS
from luyen.rollout.env.all import envs
from luyen.rollout.parsers.all import tool_parsers
from tests.architecture.registered import Knobs, estimators, knobs_of, loss_knobs_of, losses, ours


def violations(declared: Mapping[str, Iterable[str]], registered: Mapping[str, Knobs]) -> list[str]:
    """Names on one side only, and names whose knobs differ."""
    problems = [f"{n}: in the catalog, not registered" for n in declared if n not in registered]
    problems += [f"{n}: registered, not in the catalog" for n in registered if n not in declared]
    for name in sorted(declared.keys() & registered.keys()):
        difference = set(declared[name]) ^ set(registered[name])
        problems += [f"{name}: knob {knob} on one side only" for knob in sorted(difference)]
    return problems


def test_the_catalog_lists_every_estimator_with_its_knobs():
    declared = {name: facts.knobs for name, facts in ADV_ESTIMATORS.items()}
    assert violations(declared, estimators()) == []


def test_the_catalog_lists_every_policy_loss_with_its_knobs():
    declared = {name: facts.knobs for name, facts in POLICY_LOSSES.items()}
    assert violations(declared, losses()) == []


def test_the_catalog_lists_every_kind_of_environment():
    assert sorted(ENVIRONMENTS) == sorted(ours(envs))


def test_the_catalog_lists_every_format_of_tool_calls():
    assert sorted(TOOL_FORMATS) == sorted(ours(tool_parsers))


def test_a_difference_is_caught():
    def estimator(x: float, *, gamma: float = 1.0) -> float:
        return x * gamma

    registered = {"a": knobs_of(estimator)}
    assert violations({"a": ["gamma"]}, registered) == []
    assert violations({"a": ["lam"]}, registered) == [
        "a: knob gamma on one side only",
        "a: knob lam on one side only",
    ]
    assert len(violations({"b": []}, registered)) == 2


def test_the_knobs_of_a_statistics_pass_count_and_its_seed_does_not():
    assert {"clip_cov_ratio", "clip_ratio"} <= set(loss_knobs_of("clip_cov"))
    assert "seed" not in loss_knobs_of("clip_cov")
