"""Values of every key of a configuration: from its type and limits, or from a table.

Numbers are drawn around their limits and their default. What would only make a run long, wait or
end the process is bounded (`MOST`, `LEAST`), and a key whose values cannot be read off its type has
a row in `WORDS`; a test demands that no key is without values.
"""

import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from luyen.config.catalog import (
    ADV_ESTIMATORS,
    KL_KINDS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    TRAINING_ENGINES,
)
from luyen.config.plugins import ENVIRONMENTS, REWARD_MANAGERS, SAMPLERS, TOOL_FORMATS
from luyen.config.schema.run import RunConfig
from tests.fuzz.components import COMPONENTS

HERE = Path(__file__).parent.parent
ARR = "actor_rollout_ref"
ACTOR, MODEL, ROLLOUT = f"{ARR}.actor", f"{ARR}.model", f"{ARR}.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
SUMS = "arithmetic://sum?digits=1&size=12"
PRODUCTS = "arithmetic://product?digits=1&size=9"

MOST: dict[str, float] = {
    "data.train_batch_size": 8,
    "data.max_prompt_length": 48,
    "data.max_response_length": 8,
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.ppo_epochs": 2,
    f"{MODEL}.lora_rank": 8,
    f"{ROLLOUT}.n": 4,
    f"{ROLLOUT}.val_kwargs.n": 2,
    "critic.ppo_epochs": 2,
    "reward.num_workers": 2,
    "trainer.max_staleness": 2,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 2,
    f"{ROLLOUT}.nnodes": 1,
    f"{ARR}.ref.nnodes": 1,
    "critic.nnodes": 1,
}
"""Largest value of a size that a run would otherwise spend its time on."""
LEAST: dict[str, float] = {
    "data.max_prompt_length": 24,
    "reward.timeout_s": 5.0,
    "reward.memory_mb": 2048,
    f"{TURNS}.tool_timeout_s": 5.0,
    f"{TURNS}.time_budget_s": 5.0,
    "trainer.watchdog.budget_s": 600.0,
}
"""Smallest length that rows fit, time or memory: with less, rows or the machine decide."""

WORDS: dict[str, list[Any]] = {
    "data.train_files": [
        SUMS,
        "arithmetic://",
        PRODUCTS,
        f"['{SUMS}', '{PRODUCTS}']",
        f"[{{path: '{SUMS}', weight: 2, name: sums}}, {{path: '{PRODUCTS}', max_samples: 4}}]",
        f"[{{path: '{SUMS}', weight: 1}}, {{path: '{PRODUCTS}', weight: 0}}]",
        "arithmetic://sum?digits=0",
        "arithmetic://sum?digits=1&size=1",
        "arithmetic://sum?digits=1&size=16&traces=1",
        "arithmetic://sum?digits=1&size=16&pairs=even",
        "arithmetic://sum?digits=1&size=16&labels=right",
        "arithmetic://sum?digits=1&size=16&steps=1",
        "tools://calculator?size=8",
        "[]",
    ],
    "data.train_weights": ["[]", "[1]", "[2.5]", "[1, 3]", "[0]"],
    "data.train_file_samples": ["[]", "[-1]", "[8]", "[0]", "[8, 8]"],
    "data.train_names": ["[]", "[sums]", "[a, b]", "[a, a]"],
    "data.val_files": ["[]", "arithmetic://sum?digits=1&split=held-out&size=3", "arithmetic://"],
    "data.prompt_key": ["prompt", "question"],
    "data.system_prompt": ["null", "''", "add"],
    "data.prompt_template": [
        "null",
        "{prompt}",
        "{prompt}=",
        "{answer}+{prompt}",
        "{nothing}",
        "x",
    ],
    "data.ground_truth_key": ["null", "answer"],
    "data.reward_fn_key": ["data_source", "kind"],
    "data.apply_chat_template_kwargs": ["{}", "{enable_thinking: false}", "{tools: 3}"],
    "data.sampler.name": [*SAMPLERS, "nobody"],
    "data.sampler.class_path": ["null", str(HERE / "fuzz" / "rows_in_turn.py")],
    "data.sampler.class_name": ["null", "RowsInTurn", "Nobody"],
    "data.sampler.kwargs": [
        "{}",
        "{seed: 3}",
        "{seed: -1}",
        "{weights: {arithmetic/sum: 1}}",
        "{weights: {arithmetic/sum: 0}}",
        "{weights: {arithmetic/sum: -1}}",
        "{weights: {}}",
        "{weights: {other: 1}}",
        "{key: digits}",
        "{key: difficulty}",
        "{key: difficulty, stages: 13}",
        "{key: index, stages: 3, promote_at: 0.5}",
        "{key: level, stages: 0}",
        "{key: level, stages: 2, promote_at: 0.5}",
    ],
    f"{MODEL}.path": ["builtin://arithmetic", "builtin://tools", "builtin://nothing"],
    f"{MODEL}.tokenizer_path": ["null", "builtin://arithmetic", "builtin://tools"],
    f"{MODEL}.override_config": [
        "{num_hidden_layers: 1, hidden_size: 16}",
        "{num_hidden_layers: 2}",
        "{num_hidden_layers: 0}",
        "{num_hidden_layers: -1}",
        "{hidden_size: 15}",
        "{num_attention_heads: 3}",
        "{num_key_value_heads: 0}",
        "{vocab_size: 4}",
        "{max_position_embeddings: 8}",
        "{model_type: llama}",
        "{tie_word_embeddings: false}",
        "{no_such_value: 1}",
        "{hidden_size: wide}",
    ],
    f"{MODEL}.target_modules": ["all-linear", "[q_proj]", "[]", "[no_such_module]"],
    f"{MODEL}.lora_adapter_path": ["null", "/nowhere/adapter"],
    f"{ACTOR}.strategy": [*TRAINING_ENGINES, "auto", "fsdp", "deepspeed", "veomni", "nobody"],
    f"{ACTOR}.policy_loss.loss_mode": [*POLICY_LOSSES, "nobody"],
    f"{ACTOR}.kl_loss_type": [*KL_KINDS, "k9"],
    f"{ACTOR}.optim.betas": ["[0.9, 0.95]", "[0.0, 0.0]", "[1.0, 0.9]", "[-0.1, 0.9]", "[0.9]"],
    "critic.optim.betas": ["[0.9, 0.95]", "[0.0, 0.0]", "[0.9, 1.0]", "[2, 3]"],
    f"{ROLLOUT}.name": ["native", "hf", "vllm", "sglang", "nobody"],
    f"{TURNS}.tool_config_path": ["null", "/nowhere/tools.yaml"],
    f"{TURNS}.function_tool_path": ["null", str(HERE / "chatty_tools.py")],
    f"{ROLLOUT}.stop": ["[]", "['1']", "['\\n', 'end']", "['']"],
    f"{ROLLOUT}.stop_token_ids": ["[]", "[20, 21]", "[-1]", "[100000]"],
    f"{ROLLOUT}.val_kwargs.stop": ["null", "[]", "['1']", "['']"],
    f"{ROLLOUT}.val_kwargs.stop_token_ids": ["null", "[]", "[20]", "[100000]"],
    f"{ROLLOUT}.server_urls": ["[]", "[http://127.0.0.1:1]", "[nowhere]"],
    f"{ROLLOUT}.engine_kwargs": ["{}", "{vllm: {swap_space: 1}}", "{nothing: {a: 1}}"],
    f"{TURNS}.format": [*TOOL_FORMATS, "chatty", "nobody"],
    f"{TURNS}.environments": [
        "{}",
        *(f"{{w: {{kind: {kind}}}}}" for kind in ENVIRONMENTS),
        "{w: {kind: user, kwargs: {replies: [more]}}}",
        "{w: {kind: user, kwargs: {no_such: 1}}}",
    ],
    f"{TURNS}.environment": ["null", "w"],
    f"{TURNS}.interaction_config_path": ["null", "/nowhere/users.yaml"],
    f"{ARR}.ref.path": ["null", "builtin://arithmetic", "builtin://tools"],
    "critic.model.path": ["null", "builtin://arithmetic", "builtin://nothing"],
    "reward.components": COMPONENTS,
    "reward.routes": [
        "{}",
        "{'*': [exact]}",
        "{'arithmetic/*': [a]}",
        "{'other/*': [exact]}",
        "{'*': []}",
        "{'*': exact}",
    ],
    "reward.cache.path": ["null"],
    "reward.custom_reward_function.path": ["null", str(HERE / "shares_reward.py"), "/nowhere.py"],
    "reward.custom_reward_function.name": ["compute_score", "nobody"],
    "reward.custom_reward_function.reward_kwargs": ["{}", "{extra: 1}"],
    "reward.reward_manager.name": [*REWARD_MANAGERS, "nobody"],
    "reward.reward_model.rollout.name": ["native", "hf"],
    "reward.reward_model.model_path": ["null", "builtin://arithmetic"],
    "algorithm.adv_estimator": [*ADV_ESTIMATORS, "nobody"],
    "algorithm.gdpo_reward_keys": ["[]", "[digits, letters]", "[digits]", "[digits, digits]"],
    "algorithm.gdpo_reward_weights": ["[]", "[1.0, 2.0]", "[0.0]"],
    "algorithm.kl_penalty": [*KL_KINDS, "k9"],
    "algorithm.filter_groups.metric": ["null", "reward", "score", "digits"],
    "algorithm.rollout_correction.rollout_is_threshold": ["2.0", "0.5_2.0", "2_0.5", "0", "x"],
    "algorithm.rollout_correction.rollout_rs": [
        "null",
        "token_k1",
        "token_k2",
        "seq_max_k3",
        "token_k1,seq_mean_k3",
        "token_k9",
    ],
    "algorithm.rollout_correction.rollout_rs_threshold": ["null", "0.5", "2.0", "0.5_2.0", "1,2,3"],
    "trainer.best_metric": ["val/accuracy", "val/nothing"],
    "trainer.early_stopping.metric": ["null", "val/accuracy", "actor/entropy", "val/nothing"],
    "trainer.resume_from_path": ["null", "/nowhere/step_1"],
    "trainer.default_local_dir": [],
    "trainer.project_name": ["luyen", "..", "a b"],
    "trainer.experiment_name": ["run", "x/y"],
    "trainer.log_train_generations": ["0", "3"],
    "trainer.log_val_generations": ["0", "3"],
    "trainer.logger": ["jsonl", "[jsonl, tensorboard]", "[console]", "[nobody]", "[]"],
    "trainer.plugins": ["[]", str(HERE / "chatty_plugin.py"), "/nowhere/plugin.py"],
    "trainer.profile.steps": ["[]", "[0]", "[-1]", "[1, 1]", "[2]"],
    "trainer.profile.save_path": ["null"],
    "trainer.watchdog.budgets": ["{}", "{generate: 600}", "{nothing: 1}", "{update: -1}"],
    "sandbox.require": ["[]", "[files]"],
    "sft.loss": ["nll", "dft", "nobody"],
    "preference.loss_type": [
        *PREFERENCE_LOSSES,
        "[sigmoid, sft]",
        "[sigmoid, kto]",
        "[orpo, simpo]",
        "[sigmoid, aot]",
        "[kto, bco]",
        "[]",
        "nobody",
    ],
    "preference.loss_weights": ["[]", "[1.0]", "[1.0, 0.5]", "[0.0, 0.0]", "[-1.0]"],
    "reward_training.target_key": ["score", "other"],
    "distill.teacher_path": ["null", "builtin://arithmetic", "builtin://tools"],
}
"""Values of keys that are texts, lists or mappings; also bad ones, which a check has to refuse."""


@cache
def all_values() -> dict[str, tuple[Any, ...]]:
    """Every key with the values it is given."""
    return {path: tuple(_of(path, declared)) for path, declared in _leaves(RunConfig, "")}


def _leaves(model: type[BaseModel], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, declared in model.model_fields.items():
        path, kind = f"{above}{name}", declared.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{path}.")
        else:
            yield path, declared


def _of(path: str, declared: FieldInfo) -> Iterator[Any]:
    if path in WORDS:
        yield from WORDS[path]
        return
    for part in _parts(declared.annotation):
        if part is type(None):
            yield "null"
        elif part is bool:
            yield from ("true", "false")
        elif typing.get_origin(part) is Literal:
            yield from typing.get_args(part)
        elif part in (int, float):
            yield from _numbers(path, declared, is_whole=part is int)


def _parts(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def _numbers(path: str, declared: FieldInfo, *, is_whole: bool) -> Iterator[float]:
    """Around the limits, the default and 0, within the bounds of the fuzz."""
    step = 1 if is_whole else 0.01
    given = declared.default
    found: list[float] = [0 if is_whole else 0.0, -step]
    if isinstance(given, int | float) and not isinstance(given, bool):
        found += [given, given + step, given - step, given * 2]
    for limit in declared.metadata:
        match limit:
            case Ge(ge=bound) | Gt(gt=bound) | Le(le=bound) | Lt(lt=bound):
                edge = typing.cast(float, bound)
                found += [edge, edge + step, edge - step, edge + 3 * step]
            case _:
                pass
    most, least = MOST.get(path), LEAST.get(path)
    if most is not None:
        found = [value for value in found if value <= most] + [most, most / 2]
    if least is not None:
        found = [value for value in found if value >= least or value == 0] + [least]
    numbers = [int(value) if is_whole else round(float(value), 6) for value in found]
    yield from dict.fromkeys(n for n in numbers if _is_within(n, declared))


def _is_within(value: float, declared: FieldInfo) -> bool:
    """Whether the schema takes it: what it does not is refused before any rule is asked."""
    for limit in declared.metadata:
        match limit:
            case Ge(ge=bound):
                is_out = value < typing.cast(float, bound)
            case Gt(gt=bound):
                is_out = value <= typing.cast(float, bound)
            case Le(le=bound):
                is_out = value > typing.cast(float, bound)
            case Lt(lt=bound):
                is_out = value >= typing.cast(float, bound)
            case _:
                continue
        if is_out:
            return False
    return True
