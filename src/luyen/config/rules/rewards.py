"""W: the reward stack: every component, route and knob exists and has an effect."""

from collections.abc import Iterator

from luyen.base.suggest import did_you_mean
from luyen.config.python_file import arguments_of
from luyen.config.reward_parts import nodes, read_components, read_routes
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.schema.judge import ENGINE
from luyen.config.schema.reward import Component

_COMPONENTS = "reward.components"
_ROUTES = "reward.routes"


@rule("W01", "error")
def components_are_well_formed(s: Situation) -> Iterator[Finding]:
    """Each reward component has one source, keys that exist, and none that has no effect."""
    for wrong in read_components(s.config.reward)[1]:
        fix = "write NAME: {rule: RULE, weight: 1.0, kwargs: {...}}; docs/rewards.md has the rest"
        yield Finding(field=_COMPONENTS, why=wrong, fix=fix)


@rule("W02", "error")
def rules_exist(s: Situation) -> Iterator[Finding]:
    """The rule of each component is registered."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        rule = component.rule
        if rule is not None and rule not in s.known.rule_rewards:
            why = f"`{path}`: no rule `{rule}` is registered"
            fix = did_you_mean(rule, s.known.rule_rewards)
            yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("W03", "error")
def knobs_of_rules_exist(s: Situation) -> Iterator[Finding]:
    """A component gives its rule every knob that it needs, and none that it does not have."""
    for name, component in nodes(read_components(s.config.reward)[0]):
        facts = s.known.rule_rewards.get(component.rule or "")
        if facts is None or facts.knobs is None:
            continue
        for knob in component.kwargs:
            if knob not in facts.knobs:
                why = f"`{name}`: the rule `{component.rule}` has no knob `{knob}`"
                fix = did_you_mean(knob, facts.knobs)
                yield Finding(field=_COMPONENTS, why=why, fix=fix)
        for knob in facts.required:
            if knob not in component.kwargs:
                why = f"`{name}`: the rule `{component.rule}` needs the knob `{knob}`"
                yield Finding(field=_COMPONENTS, why=why, fix=f"set {name}.kwargs.{knob}")


@rule("W04", "error")
def routes_lead_somewhere(s: Situation) -> Iterator[Finding]:
    """Each route names at least one component or rule, and they exist."""
    known = {*s.config.reward.components, *s.known.rule_rewards}
    for pattern, names in read_routes(s.config.reward).items():
        if not names:
            why = f"`{pattern}`: nothing judges these rows"
            yield Finding(field=_ROUTES, why=why, fix="name components or rules")
        for name in names:
            if name not in known:
                why = f"`{pattern}`: `{name}` is neither a component nor a rule"
                yield Finding(field=_ROUTES, why=why, fix=did_you_mean(name, known))


@rule("W05", "error")
def components_are_used(s: Situation) -> Iterator[Finding]:
    """A component is used by some route, once there are routes."""
    routes = read_routes(s.config.reward)
    used = {name for names in routes.values() for name in names}
    for name in s.config.reward.components:
        if routes and name not in used:
            why = f"`{name}`: no route of reward.routes names it, so it has no effect"
            yield Finding(field=_COMPONENTS, why=why, fix="add it to a route, or drop it")


@rule("W06", "error")
def custom_function_stands_alone(s: Situation) -> Iterator[Finding]:
    """Components and routes are set only when no custom function replaces them."""
    reward = s.config.reward
    if reward.custom_reward_function.path is None:
        return
    for field, written in ((_COMPONENTS, reward.components), (_ROUTES, reward.routes)):
        if written:
            why = "reward.custom_reward_function.path judges every row, so it has no effect"
            yield Finding(field=field, why=why, fix="keep one of the two")


@rule("W07", "warning")
def custom_function_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys of the custom function are changed only when a file is named."""
    if s.config.reward.custom_reward_function.path is not None:
        return
    for name in ("name", "reward_kwargs"):
        field = f"reward.custom_reward_function.{name}"
        if s.is_changed(field):
            why = "reward.custom_reward_function.path is not set, so it has no effect"
            yield Finding(field=field, why=why, fix="set the path, or drop it")


@rule("W08", "error")
def overlong_penalty_is_applied(s: Situation) -> Iterator[Finding]:
    """The overlong penalty is on only with the manager that applies it."""
    name = s.config.reward.reward_manager.name
    if s.config.reward.overlong_buffer.enable and name != "dapo":
        yield Finding(
            field="reward.overlong_buffer.enable",
            why=f"the reward manager `{name}` does not apply it",
            fix="set reward.reward_manager.name=dapo, or use the rule `overlong` as a component",
        )


@rule("W09", "error")
def overlong_buffer_fits(s: Situation) -> Iterator[Finding]:
    """The overlong buffer is not longer than a response."""
    overlong_buffer = s.config.reward.overlong_buffer
    most = s.config.data.max_response_length
    if overlong_buffer.enable and overlong_buffer.len > most:
        why = f"a response has at most {most} tokens (data.max_response_length)"
        yield Finding(field="reward.overlong_buffer.len", why=why, fix=f"set it to at most {most}")


@rule("W10", "warning")
def overlong_knob_has_effect(s: Situation) -> Iterator[Finding]:
    """Keys of the overlong penalty are changed only when it is on."""
    if s.config.reward.overlong_buffer.enable:
        return
    for name in ("len", "penalty_factor"):
        if s.is_changed(f"reward.overlong_buffer.{name}"):
            why = "reward.overlong_buffer.enable is false, so it has no effect"
            fix = "drop it, or set reward.overlong_buffer.enable=true"
            yield Finding(field=f"reward.overlong_buffer.{name}", why=why, fix=fix)


@rule("W11", "error")
def batch_has_a_function(s: Situation) -> Iterator[Finding]:
    """The manager `batch` has a custom function to call, which takes lists."""
    reward = s.config.reward
    custom_reward_function = reward.custom_reward_function
    if reward.reward_manager.name != "batch":
        return
    field, path = "reward.reward_manager.name", custom_reward_function.path
    if path is None:
        why = "`batch` hands lists to a function of yours, and none is named"
        fix = f"set reward.custom_reward_function.path, or {field}=naive"
        yield Finding(field=field, why=why, fix=fix)
        return
    found = arguments_of(path, custom_reward_function.name)
    if found is not None and not found.takes("solution_strs"):
        name = custom_reward_function.name
        why = f"`batch` hands lists to the function, and `{name}` takes no `solution_strs`"
        fix = f"define {name}(data_sources, solution_strs, ground_truths, extra_infos), "
        yield Finding(field=field, why=why, fix=f"{fix}or set {field}=naive")


@rule("W12", "error")
def packages_of_rules_are_installed(s: Situation) -> Iterator[Finding]:
    """The package that a chosen rule needs is installed."""
    reward = s.config.reward
    components = read_components(reward)[0]
    named = {name for names in read_routes(reward).values() for name in names}
    chosen = {_COMPONENTS: set(_rules(components)), _ROUTES: named - components.keys()}
    for field, rules in chosen.items():
        for name in sorted(rules & s.known.rule_rewards.keys()):
            facts = s.known.rule_rewards[name]
            if facts.package is not None and not s.installed(facts.package):
                why = f"the rule `{name}` needs the package {facts.package}: not installed here"
                yield Finding(field=field, why=why, fix=f"pip install 'luyen[{facts.extra}]'")


@rule("W13", "warning")
def cache_has_something_to_keep(s: Situation) -> Iterator[Finding]:
    """The cache is on only where something else than the run's own engine judges."""
    reward = s.config.reward
    leaves = [n for _, n in nodes(read_components(reward)[0]) if n.parts is None]
    is_own = [n.judge is not None and n.judge.base_url == ENGINE for n in leaves]
    if reward.cache.enable and leaves and all(is_own) and not read_routes(reward):
        why = f"only {ENGINE} judges, and the policy's replies change with it: nothing is kept"
        yield Finding(field="reward.cache.enable", why=why, fix="set it to false")


def _rules(components: dict[str, Component]) -> Iterator[str]:
    for _, component in nodes(components):
        if component.rule is not None:
            yield component.rule
