"""W, V: reward components, routes, gates and arguments exist, fit the rows and have effect."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from luyen.base.errors import UserError, did_you_mean
from luyen.config.plugins import arguments_of
from luyen.config.reward_components import (
    ARGUMENT_SPECS,
    RULE_REWARDS,
    judge_api_key,
    nodes,
    read_components,
    read_routes,
    scoring_order,
)
from luyen.config.rules.rule import Finding, RuleContext, rule
from luyen.config.schema.reward import ENGINE, ComponentConfig

_COMPONENTS = "reward.components"
_ROUTES = "reward.routes"


@rule("W01", "error")
def components_are_well_formed(s: RuleContext) -> Iterator[Finding]:
    """Each reward component has one source, keys that exist, and none that has no effect."""
    for wrong in read_components(s.config.reward)[1]:
        fix = "write NAME: {rule: RULE, weight: 1.0, kwargs: {...}}; docs/rewards.md has the rest"
        yield Finding(field=_COMPONENTS, why=wrong, fix=fix)


@rule("W02", "error")
def rules_exist(s: RuleContext) -> Iterator[Finding]:
    """The rule of each component is registered."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        rule = component.rule
        if rule is not None and rule not in s.known.rule_rewards:
            why = f"`{path}`: no rule `{rule}` is registered"
            fix = did_you_mean(rule, s.known.rule_rewards)
            yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("W03", "error")
def arguments_of_rules_exist(s: RuleContext) -> Iterator[Finding]:
    """A component gives its rule all required arguments, and none that the rule does not have."""
    for name, component in nodes(read_components(s.config.reward)[0]):
        facts = s.known.rule_rewards.get(component.rule or "")
        if facts is None or facts.hparams is None:
            continue
        for hparam in component.kwargs:
            if hparam not in facts.hparams:
                why = f"`{name}`: the rule `{component.rule}` has no argument `{hparam}`"
                fix = did_you_mean(hparam, facts.hparams)
                yield Finding(field=_COMPONENTS, why=why, fix=fix)
        for hparam in facts.required:
            if hparam not in component.kwargs:
                why = f"`{name}`: the rule `{component.rule}` needs the argument `{hparam}`"
                yield Finding(field=_COMPONENTS, why=why, fix=f"set {name}.kwargs.{hparam}")


@rule("W04", "error")
def routes_lead_somewhere(s: RuleContext) -> Iterator[Finding]:
    """Each route names at least one component or rule, and they exist."""
    known = {*s.config.reward.components, *s.known.rule_rewards}
    for pattern, names in read_routes(s.config.reward).items():
        if not names:
            why = f"`{pattern}`: nothing scores these rows"
            yield Finding(field=_ROUTES, why=why, fix="name components or rules")
        for name in names:
            if name not in known:
                why = f"`{pattern}`: `{name}` is neither a component nor a rule"
                yield Finding(field=_ROUTES, why=why, fix=did_you_mean(name, known))


@rule("W05", "error")
def components_are_used(s: RuleContext) -> Iterator[Finding]:
    """A component is used by some route, once there are routes."""
    routes = read_routes(s.config.reward)
    used = {name for names in routes.values() for name in names}
    for name in s.config.reward.components:
        if routes and name not in used:
            why = f"`{name}`: no route of reward.routes names it, so it has no effect"
            yield Finding(field=_COMPONENTS, why=why, fix="add it to a route, or drop it")


@rule("W06", "error")
def custom_function_stands_alone(s: RuleContext) -> Iterator[Finding]:
    """Components and routes are set only when no custom function replaces them."""
    reward = s.config.reward
    if reward.custom_reward_function.path is None:
        return
    for field, written in ((_COMPONENTS, reward.components), (_ROUTES, reward.routes)):
        if written:
            why = "reward.custom_reward_function.path scores every row, so it has no effect"
            yield Finding(field=field, why=why, fix="keep one of the two")


@rule("W07", "warning")
def custom_function_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of the custom function are changed only when a file is named."""
    if s.config.reward.custom_reward_function.path is not None:
        return
    for name in ("name", "reward_kwargs"):
        field = f"reward.custom_reward_function.{name}"
        if s.is_changed(field):
            why = "reward.custom_reward_function.path is not set, so it has no effect"
            yield Finding(field=field, why=why, fix="set the path, or drop it")


@rule("W08", "error")
def overlong_penalty_is_applied(s: RuleContext) -> Iterator[Finding]:
    """The overlong penalty is on only with the manager that applies it."""
    name = s.config.reward.reward_manager.name
    if s.config.reward.overlong_buffer.enable and name != "dapo":
        yield Finding(
            field="reward.overlong_buffer.enable",
            why=f"the reward manager `{name}` does not apply it",
            fix="set reward.reward_manager.name=dapo, or use the rule `overlong` as a component",
        )


@rule("W09", "error")
def overlong_buffer_fits(s: RuleContext) -> Iterator[Finding]:
    """The overlong buffer is not longer than a response."""
    overlong_buffer = s.config.reward.overlong_buffer
    most = s.config.data.max_response_length
    if overlong_buffer.enable and overlong_buffer.len > most:
        why = f"a response has at most {most} tokens (data.max_response_length)"
        yield Finding(field="reward.overlong_buffer.len", why=why, fix=f"set it to at most {most}")


@rule("W10", "warning")
def overlong_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of the overlong penalty are changed only when it is on."""
    if s.config.reward.overlong_buffer.enable:
        return
    for name in ("len", "penalty_factor"):
        if s.is_changed(f"reward.overlong_buffer.{name}"):
            why = "reward.overlong_buffer.enable is false, so it has no effect"
            fix = "drop it, or set reward.overlong_buffer.enable=true"
            yield Finding(field=f"reward.overlong_buffer.{name}", why=why, fix=fix)


@rule("W11", "error")
def batch_has_a_function(s: RuleContext) -> Iterator[Finding]:
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
    is_trl = found is not None and "completions" in found.names
    if found is not None and not is_trl and not found.takes("solution_strs"):
        name = custom_reward_function.name
        why = f"`batch` hands lists to the function, and `{name}` takes no `solution_strs`"
        fix = f"define {name}(data_sources, solution_strs, ground_truths, extra_infos), "
        yield Finding(field=field, why=why, fix=f"{fix}or set {field}=naive")


@rule("W12", "error")
def packages_of_rules_are_installed(s: RuleContext) -> Iterator[Finding]:
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
def cache_has_something_to_keep(s: RuleContext) -> Iterator[Finding]:
    """The cache is on only if something other than the run's own engine scores."""
    reward = s.config.reward
    leaves = [n for _, n in nodes(read_components(reward)[0]) if n.parts is None]
    is_own = [n.judge is not None and n.judge.base_url == ENGINE for n in leaves]
    if reward.cache.enable and leaves and all(is_own) and not read_routes(reward):
        why = f"only {ENGINE} scores, and its replies change with the policy: nothing can be cached"
        yield Finding(field="reward.cache.enable", why=why, fix="set it to false")


def _rules(components: dict[str, ComponentConfig]) -> Iterator[str]:
    for _, component in nodes(components):
        if component.rule is not None:
            yield component.rule


# V: the reward tree: gates name siblings, and combining and normalising have an effect.


def _families(s: RuleContext) -> Iterator[tuple[str, Mapping[str, ComponentConfig], str]]:
    """Groups of siblings: their path, the nodes by name, and how they are combined."""
    reward = s.config.reward
    components = read_components(reward)[0]
    routes = read_routes(reward) or {"": tuple(components)}
    for pattern, names in routes.items():
        taken = {name: components.get(name) or ComponentConfig(rule=name) for name in names}
        yield f"route `{pattern}`: " if pattern else "", taken, reward.combine
    for path, node in nodes(components):
        if node.parts is not None:
            yield f"`{path}`: ", node.parts, node.combine


@rule("V01", "error")
def gates_lead_to_siblings(s: RuleContext) -> Iterator[Finding]:
    """A gate names a sibling of its node."""
    for where, siblings, _ in _families(s):
        for name, node in siblings.items():
            if node.gate is not None and node.gate.by not in siblings.keys() - {name}:
                why = f"{where}`{name}`: its gate looks at `{node.gate.by}`, which is no sibling"
                fix = did_you_mean(node.gate.by, [n for n in siblings if n != name])
                yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("V02", "error")
def gates_do_not_wait_for_one_another(s: RuleContext) -> Iterator[Finding]:
    """There is an order in which siblings can be scored."""
    for where, siblings, combine in _families(s):
        known = {name for wave in scoring_order(siblings, combine) for name in wave}
        gates = {name: node.gate.by for name, node in siblings.items() if node.gate is not None}
        waiting = [n for n in siblings if n not in known and gates.get(n, n) in siblings]
        if waiting and all(by in siblings for by in gates.values()):
            why = f"{where}{', '.join(f'`{n}`' for n in waiting)} wait for one another"
            fix = "let a gate look at a node that does not depend on it"
            yield Finding(field=_COMPONENTS, why=why, fix=fix)


@rule("V03", "error")
def bars_are_looked_at(s: RuleContext) -> Iterator[Finding]:
    """A bar is set only where later siblings are gated by it."""
    for where, siblings, combine in _families(s):
        for name, node in siblings.items():
            if "bar" in node.model_fields_set and combine != "lexicographic":
                why = f"{where}`{name}`: bar has an effect only where combine is lexicographic"
                yield Finding(field=_COMPONENTS, why=why, fix="drop it, or use a gate")


@rule("V04", "error")
def learned_reward_is_there(s: RuleContext) -> Iterator[Finding]:
    """A component reads the reward model exactly when it is enabled."""
    reward = s.config.reward
    learned = [p for p, node in nodes(read_components(reward)[0]) if node.model is not None]
    if learned and not reward.reward_model.enable:
        why = f"`{learned[0]}` reads the reward model, which is off"
        yield Finding(field=_COMPONENTS, why=why, fix="set reward.reward_model.enable=true")
    if reward.reward_model.enable and not learned and not read_components(reward)[1]:
        why = "no component reads the reward model, so it has no effect"
        fix = "add a component {model: reward_model}, or set reward.reward_model.enable=false"
        yield Finding(field="reward.reward_model.enable", why=why, fix=fix)


@rule("V05", "error")
def combining_has_effect(s: RuleContext) -> Iterator[Finding]:
    """The way to combine components is chosen only where components are combined."""
    if not s.is_changed("reward.combine"):
        return
    why = None
    if s.config.reward.custom_reward_function.path is not None:
        why = "reward.custom_reward_function.path scores every row, so it has no effect"
    elif all(len(some) < 2 for where, some, _ in _families(s) if not where.startswith("`")):
        why = "there are fewer than two components to combine"
    if why is not None:
        yield Finding(field="reward.combine", why=why, fix="drop it")


@rule("V06", "error")
def gdpo_has_groups(s: RuleContext) -> Iterator[Finding]:
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
def nothing_is_normalised_twice(s: RuleContext) -> Iterator[Finding]:
    """What is normalised over its group is not normalised a second time."""
    for where, siblings, combine in _families(s):
        for name, node in siblings.items():
            if combine == "gdpo" and node.normalise == "running":
                why = f"{where}`{name}`: gdpo normalises it again, so `running` has no effect"
                yield Finding(field=_COMPONENTS, why=why, fix="drop normalise")
    if s.config.reward.combine == "gdpo" and s.config.algorithm.adv_estimator == "gdpo":
        why = "algorithm.adv_estimator=gdpo normalises every component of the group again"
        yield Finding(field="reward.combine", why=why, fix="set reward.combine=sum")


# W: arguments of rules and judges: patterns compile, values have their type, API keys are set.

_PATTERNS = {"regex": "pattern", "tool_safety": "forbidden_arguments"}
"""Rule -> the argument that holds regular expressions."""


@rule("W14", "error")
def patterns_are_regular_expressions(s: RuleContext) -> Iterator[Finding]:
    """Patterns of the rules `regex` and `tool_safety` are regular expressions."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        hparam = _PATTERNS.get(component.rule or "")
        if hparam is None or hparam not in component.kwargs:
            continue
        for pattern in _leaves(component.kwargs[hparam]):
            wrong = _wrong(pattern)
            if wrong is not None:
                why = f"`{path}`: {hparam} {pattern!r} is no regular expression: {wrong}"
                yield Finding(field=_COMPONENTS, why=why, fix=f"correct {path}.kwargs.{hparam}")


@rule("W16", "error")
def arguments_have_their_type(s: RuleContext) -> Iterator[Finding]:
    """An argument of a built-in rule has a value that the rule can compute with."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        if component.rule not in RULE_REWARDS:
            continue
        for hparam, value in component.kwargs.items():
            kind = ARGUMENT_SPECS.get(hparam)
            if kind is not None and hparam in (RULE_REWARDS[component.rule].hparams or ()):
                wrong = f"expected {kind.words()}" if not kind.takes(value) else ""
                if hparam == "schema" and not wrong:
                    wrong = _wrong_schema(value)
                if wrong:
                    why = f"`{path}`: {hparam} {value!r}: {wrong}"
                    yield Finding(field=_COMPONENTS, why=why, fix=f"correct {path}.kwargs.{hparam}")


@rule("W15", "error")
def judge_api_keys_are_set(s: RuleContext) -> Iterator[Finding]:
    """The environment variable that holds a judge's key is set."""
    for path, component in nodes(read_components(s.config.reward)[0]):
        if component.judge is None or component.judge.api_key_env is None:
            continue
        try:
            judge_api_key(component.judge.api_key_env)
        except UserError as error:
            why = f"`{path}`: {error.field} = {error.value}: {error.why}"
            yield Finding(field=_COMPONENTS, why=why, fix=error.fix)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in cast(Mapping[Any, Any], value).values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in cast(list[Any], value):
            yield from _leaves(inner)
    else:
        yield value


def _wrong_schema(schema: Any) -> str:
    """Why a value is no JSON schema; empty: it is one."""
    try:
        Draft202012Validator.check_schema(schema or {})
    except SchemaError as error:
        return f"it is no JSON schema: {error.message}"
    return ""


def _wrong(pattern: Any) -> str | None:
    """Why a value is no regular expression; None: it is one."""
    if not isinstance(pattern, str):
        return "it is no text"
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


# W: rules and judges fit the rows and answer lengths, as far as those are known.

_CARRIED = {
    "choice": "a letter as ground truth",
    "code": "tests",
    "ifeval": "instructions",
    "json_schema": "a schema",
    "reasoning_gym": "an entry of reasoning_gym",
}
"""Rule -> what it reads of a row, which rows of `arithmetic://` and `tools://` do not have."""
_PLAIN = ("arithmetic", "tools")


@rule("W17", "error")
def lengths_lie_within_a_response(s: RuleContext) -> Iterator[Finding]:
    """What a rule of lengths leaves free, or penalises, is part of the longest response."""
    for path, node in nodes(read_components(s.config.reward)[0]):
        own = node.kwargs.get("max_response_length")
        most = own if isinstance(own, int) else s.config.data.max_response_length
        free, buffer = node.kwargs.get("free"), node.kwargs.get("buffer")
        why = None
        if node.rule == "length" and isinstance(free, int) and free >= most:
            why = f"free = {free} leaves nothing to penalise below {most} tokens"
        if node.rule == "overlong" and isinstance(buffer, int) and buffer > most:
            why = f"a buffer of {buffer} tokens does not fit into {most}"
        if why is not None:
            fix = "lower it, or raise data.max_response_length"
            yield Finding(field=_COMPONENTS, why=f"`{path}`: {why}", fix=fix)


@rule("W18", "error")
def rows_have_what_rules_read(s: RuleContext) -> Iterator[Finding]:
    """Rows of a built-in task carry what the rules of components and routes read of a row."""
    files = s.config.data.train_files
    if not files or any(path.partition("://")[0] not in _PLAIN for path in files):
        return
    for field, path, node in [*_components(s), *_rules_of_routes(s)]:
        if node.rule in _CARRIED and not _brings_its_own(node):
            why = f"`{path}`: the rule `{node.rule}` reads {_CARRIED[node.rule]} of a row, and "
            why += f"those of {files[0]} have none"
            yield Finding(field=field, why=why, fix="choose a rule such as exact or numeric")


def _components(s: RuleContext) -> Iterator[tuple[str, str, ComponentConfig]]:
    for path, node in nodes(read_components(s.config.reward)[0]):
        yield _COMPONENTS, path, node


def _rules_of_routes(s: RuleContext) -> Iterator[tuple[str, str, ComponentConfig]]:
    """Rules that routes name without a component, where rows of a built-in task take the route."""
    routes = read_routes(s.config.reward)
    names = [path.partition("?")[0].replace("://", "/") for path in s.config.data.train_files]
    for source in dict.fromkeys(names):
        taken = [pattern for pattern in routes if fnmatchcase(source, pattern)]
        for name in routes[taken[0]] if taken else ():
            if name not in s.config.reward.components:
                yield _ROUTES, taken[0], ComponentConfig(rule=name)


def _brings_its_own(node: ComponentConfig) -> bool:
    has_digits = any(letter.isdigit() for letter in str(node.kwargs.get("choices", "")))
    return bool(node.kwargs.get("schema")) or has_digits


@rule("W19", "error")
def engine_holds_a_judgement(s: RuleContext) -> Iterator[Finding]:
    """The run's own engine has room for a question and the reply of a judge."""
    longest = s.batch.longest_sequence
    for path, node in nodes(read_components(s.config.reward)[0]):
        judge = node.judge
        if judge is not None and judge.base_url == ENGINE and judge.max_tokens >= longest:
            why = f"`{path}`: a reply may have {judge.max_tokens} tokens, and the engine holds "
            why += f"{longest} with the question"
            fix = "lower judge.max_tokens, or raise data.max_prompt_length"
            yield Finding(field=_COMPONENTS, why=why, fix=fix)
