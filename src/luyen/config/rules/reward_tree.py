"""V: the reward tree: gates lead to siblings, and nothing is combined or normalised in vain."""

from collections.abc import Iterator, Mapping

from luyen.base.suggest import did_you_mean
from luyen.config.reward_parts import judging_order, nodes, read_components, read_routes
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.schema.reward import Component

_COMPONENTS = "reward.components"


def _families(s: Situation) -> Iterator[tuple[str, Mapping[str, Component], str]]:
    """Siblings that are judged together: where they stand, who they are, how they are combined."""
    reward = s.config.reward
    components = read_components(reward)[0]
    routes = read_routes(reward) or {"": tuple(components)}
    for pattern, names in routes.items():
        taken = {name: components.get(name) or Component(rule=name) for name in names}
        yield f"route `{pattern}`: " if pattern else "", taken, reward.combine
    for path, node in nodes(components):
        if node.parts is not None:
            yield f"`{path}`: ", node.parts, node.combine


@rule("V01", "error")
def gates_lead_to_siblings(s: Situation) -> Iterator[Finding]:
    """A gate looks at a sibling that is judged beside its node."""
    for where, siblings, _ in _families(s):
        for name, node in siblings.items():
            if node.gate is not None and node.gate.by not in siblings.keys() - {name}:
                why = f"{where}`{name}`: its gate looks at `{node.gate.by}`, which is no sibling"
                fix = did_you_mean(node.gate.by, [n for n in siblings if n != name])
                yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("V02", "error")
def gates_do_not_wait_for_one_another(s: Situation) -> Iterator[Finding]:
    """There is an order in which siblings can be judged."""
    for where, siblings, combine in _families(s):
        known = {name for wave in judging_order(siblings, combine) for name in wave}
        gates = {name: node.gate.by for name, node in siblings.items() if node.gate is not None}
        waiting = [n for n in siblings if n not in known and gates.get(n, n) in siblings]
        if waiting and all(by in siblings for by in gates.values()):
            why = f"{where}{', '.join(f'`{n}`' for n in waiting)} wait for one another"
            fix = "let a gate look at a node that is judged without it"
            yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("V03", "error")
def bars_are_looked_at(s: Situation) -> Iterator[Finding]:
    """A bar is set only where later siblings are gated by it."""
    for where, siblings, combine in _families(s):
        for name, node in siblings.items():
            if "bar" in node.model_fields_set and combine != "lexicographic":
                why = f"{where}`{name}`: bar has an effect only where combine is lexicographic"
                yield Finding(field=_COMPONENTS, why=why, fix="drop it, or use a gate")


@rule("V04", "error")
def learned_reward_is_there(s: Situation) -> Iterator[Finding]:
    """A component asks for the learned reward exactly when it is on."""
    reward = s.config.reward
    asked = [p for p, node in nodes(read_components(reward)[0]) if node.model is not None]
    if asked and not reward.reward_model.enable:
        why = f"`{asked[0]}` asks for the learned reward, which is off"
        yield Finding(field=_COMPONENTS, why=why, fix="set reward.reward_model.enable=true")
    if reward.reward_model.enable and not asked and not read_components(reward)[1]:
        why = "no component asks for the learned reward, so it has no effect"
        fix = "add a component {model: reward_model}, or set reward.reward_model.enable=false"
        yield Finding(field="reward.reward_model.enable", why=why, fix=fix)


@rule("V05", "error")
def combining_has_effect(s: Situation) -> Iterator[Finding]:
    """The way to combine components is chosen only where components are combined."""
    if not s.is_changed("reward.combine"):
        return
    why = None
    if s.config.reward.custom_reward_function.path is not None:
        why = "reward.custom_reward_function.path judges every row, so it has no effect"
    elif all(len(some) < 2 for where, some, _ in _families(s) if not where.startswith("`")):
        why = "there are fewer than two components to combine"
    if why is not None:
        yield Finding(field="reward.combine", why=why, fix="drop it")


@rule("V06", "error")
def gdpo_has_groups(s: Situation) -> Iterator[Finding]:
    """Normalising over groups is chosen only where groups are large and without a baseline."""
    if not any(combine == "gdpo" for _, some, combine in _families(s) if some):
        return
    if s.config.actor_rollout_ref.rollout.n < 2:
        why = "combine gdpo compares the rollouts of a prompt, and there is only one of each"
        yield Finding(field=_COMPONENTS, why=why, fix="raise actor_rollout_ref.rollout.n")
    if s.estimator is not None and "baselines" in s.estimator.needs:
        why = "combine gdpo gives the greedy answer, which is alone in its group, always 0"
        yield Finding(field=_COMPONENTS, why=why, fix="choose another algorithm.adv_estimator")


@rule("V07", "warning")
def nothing_is_normalised_twice(s: Situation) -> Iterator[Finding]:
    """What is normalised over its group is not normalised a second time."""
    for where, siblings, combine in _families(s):
        for name, node in siblings.items():
            if combine == "gdpo" and node.normalise == "running":
                why = f"{where}`{name}`: gdpo normalises it again, so `running` has no effect"
                yield Finding(field=_COMPONENTS, why=why, fix="drop normalise")
    if s.config.reward.combine == "gdpo" and s.config.algorithm.adv_estimator == "gdpo":
        why = "algorithm.adv_estimator=gdpo normalises every component of the group again"
        yield Finding(field="reward.combine", why=why, fix="set reward.combine=sum")
