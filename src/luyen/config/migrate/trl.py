"""TRL: a YAML file of its commands, the options of a command, or the arguments in a Python file.

A Python file is read by its syntax tree; nothing of it is executed. Values that are plain there
(`python_values`) are known, everything else that it computes stays open.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.config.loader.load import read_override
from luyen.config.migrate.common import always, name_of, named, never, placed, refused
from luyen.config.migrate.dialect import entries as dialect_entries
from luyen.config.migrate.python_values import (
    OPEN,
    constants,
    defines,
    is_importable,
    is_open,
    value_of,
)
from luyen.config.migrate.report import (
    Entry,
    Outcome,
    Rule,
    SourceConfig,
    by_hand,
    flat,
    implied,
    keep,
    missing,
)
from luyen.config.migrate.trainer_keys import MODEL, uses_lora

TOOL = "TRL"
CONFIGS = {
    "GRPOConfig": "grpo",
    "AsyncGRPOConfig": "grpo",
    "DPOConfig": "dpo",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
    "PRMConfig": "prm",
    "KTOConfig": "kto",
    "BCOConfig": "bco",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
    "PPOConfig": "ppo",
    "RLOOConfig": "rloo",
}
_ADAPTER = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "task_type": "lora_task_type",
    "bias": "lora_bias",
}
_CHANGES = ("map", "filter", "select", "take", "skip", "rename_column", "rename_columns")
"""Methods of a dataset that change its rows, which are then not those of the file."""
_DATASETS = ("load_dataset", "load_from_disk", "from_list", "from_dict", "from_generator")
_TRAINER_OBJECTS = (
    *("tools", "rollout_func", "environment_factory", "callbacks", "optimizers", "eval_dataset"),
    *("formatting_func", "data_collator", "compute_metrics"),
)
"""Arguments of a trainer that are objects of the script."""
_TRAINER_KEYS = (
    *("dataset_text_field", "max_seq_length", "packing", "dataset_num_proc", "max_length"),
    *("max_prompt_length", "beta", "loss_type", "label_smoothing"),
)
"""Keys that were arguments of the trainer before TRL had a configuration of each method."""
_LOADING = (
    *("fast_inference", "max_lora_rank", "gpu_memory_utilization", "use_cache", "token"),
    *("local_files_only", "offload_folder", "num_labels", "full_finetuning", "force_download"),
)
_PATH_WORDS = ("pretrained_model_name_or_path", "model_name")
_LOADERS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "FastLanguageModel")
SYNONYMS = {
    "model_name": "model_name_or_path",
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "max_new_tokens": "max_completion_length",
    "response_length": "max_completion_length",
    "dtype": "torch_dtype",
    "kl_coef": "beta",
    "dataset_eval_split": "dataset_test_split",
    "optimizer": "optim",
}
"""Older and other names of TRL's own keys."""
_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "save_steps": 500,
    "seed": 42,
    "max_grad_norm": 1.0,
}
_BY_METHOD: dict[str, dict[str, Any]] = {
    "grpo": {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 256,
        "loss_type": "dapo",
        "beta": 0.0,
    },
    "rloo": {
        "learning_rate": 1e-6,
        "num_generations": 2,
        "max_prompt_length": 512,
        "max_completion_length": 256,
        "beta": 0.05,
    },
    "ppo": {
        "learning_rate": 3e-6,
        "num_ppo_epochs": 4,
        "beta": 0.05,
        "max_completion_length": 53,
        "temperature": 0.7,
        "lam": 0.95,
        "cliprange_value": 0.2,
    },
    "sft": {"learning_rate": 2e-5, "max_length": 1024},
    "reward": {"learning_rate": 1e-4, "max_length": 1024},
    "prm": {"learning_rate": 1e-5, "max_length": 1024},
    **{
        name: {"learning_rate": 1e-6, "beta": 0.1, "max_length": 1024}
        for name in ("dpo", "kto", "bco", "orpo")
    },
    "cpo": {
        "learning_rate": 1e-6,
        "beta": 0.1,
        "max_length": 1024,
        "loss_type": "sigmoid",
        "cpo_alpha": 1.0,
    },
}
_PEFT = {"lora_r": 8, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
_MODEL_CONFIG = {
    **{"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "lora_target_modules": ["q_proj", "v_proj"],
    "use_bnb_nested_quant": False,
}


def defaults_of(method: str, *, is_python: bool) -> dict[str, Any]:
    """What TRL uses where nothing is written."""
    adapter = _PEFT if is_python else _MODEL_CONFIG
    return {**_COMMON, **adapter, **_BY_METHOD[method]}


def method_of(values: Mapping[str, Any], hint: str = "") -> str:
    """The trainer that a YAML file is for, by its command, its keys or its name."""
    for word in re.split(r"[^a-z]+", hint.lower()):
        name = {"rm": "reward"}.get(word, word)
        if name in _BY_METHOD:
            return name
    signs = {
        "grpo": ("num_generations", "reward_funcs", "max_completion_length", "use_vllm"),
        "kto": ("desirable_weight", "undesirable_weight"),
        "dpo": ("beta", "precompute_ref_log_probs", "ref_model"),
        "reward": ("center_rewards_coefficient",),
    }
    for method, keys in signs.items():
        if any(key in values for key in keys):
            return method
    return "sft"


def is_trl(values: Mapping[str, Any]) -> bool:
    """Whether a YAML file is one of a `trl` command."""
    names = ("model_name_or_path", "dataset_name", "dataset_mixer", "model_name", "num_generations")
    return any(name in values for name in names)


def read_yaml(values: Mapping[str, Any], source: SourceConfig, hint: str) -> SourceConfig:
    """The keys of a YAML file."""
    return _source(flat(values), method_of(values, hint), source, is_python=False)


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`--key value` of a command, values as YAML reads them; a key without one is true.

    Example:
        >>> read_options(["trl", "dpo", "--beta", "0.1", "--bf16", "--logger", "a", "b"])
        {'beta': 0.1, 'bf16': True, 'logger': ['a', 'b']}
    """
    found: dict[str, list[str]] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            name = key.replace("-", "_")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word)
    values: dict[str, Any] = {}
    for key, listed in found.items():
        read = [read_override(f"value={one}").values.get("value", one) for one in listed]
        values[key] = True if not read else read[0] if len(read) == 1 else read
    return values


def _source(
    values: Mapping[str, Any], method: str, source: SourceConfig, *, is_python: bool
) -> SourceConfig:
    off = {key: key[3:] for key, value in values.items() if key.startswith("no_") and value is True}
    names = {key: off.get(key) or SYNONYMS.get(key, key) for key in values}
    written = {name: key for key, name in names.items()}
    named = {names[key]: False if key in off else value for key, value in values.items()}
    processes = named.get("num_processes")
    return replace(
        source,
        tool=TOOL,
        method=method,
        values=named,
        written=written,
        defaults=defaults_of(method, is_python=is_python),
        devices=int(processes) if isinstance(processes, int) else source.devices,
    )


def entries(source: SourceConfig) -> list[Entry]:
    """What becomes of every key; what the script computes is named as such."""
    open_keys = {k: v for k, v in source.values.items() if str(v).startswith(OPEN)}
    known = {k: v for k, v in source.values.items() if k not in open_keys}
    found = dialect_entries(replace(source, values=known), OWN_RULES)
    more = [
        Entry(
            source=source.written.get(key, key),
            value=str(value).removeprefix(OPEN),
            outcome=by_hand(_computed(key, source)),
        )
        for key, value in open_keys.items()
    ]
    return [*found, *more]


def _computed(key: str, source: SourceConfig) -> str:
    why = "the script computes it: write the value by hand"
    default = source.defaults.get(key)
    return why if default is None else f"{why}; the file has TRL's default, {default}"


_OPEN_R1 = "a key of open-r1's own scripts; `luyen eval` measures checkpoints"
_CALLBACKS = "callbacks are objects of luyen.train; `luyen eval` measures checkpoints"
_CHANGED = "the script changes rows: write what it makes to a file, and name that file"
_ROLLOUTS = "conversations with tools and environments: see `luyen explain multi_turn`"


def _evaluated(value: Any, source: SourceConfig) -> Outcome:
    del value
    if source.has("eval_dataset_path") or source.has("dataset_test_split"):
        return implied("its rows are in data.val_files")
    return missing("write its rows to a file, and name it in data.val_files")


def _checkpointing(value: Any, source: SourceConfig) -> Outcome:
    if source.has("gradient_checkpointing"):
        return implied("gradient_checkpointing decides")
    return keep({f"{MODEL}.enable_gradient_checkpointing": bool(value)})


def _reference(value: Any, source: SourceConfig) -> Outcome:
    if value == source.get("model_name_or_path"):
        return implied("the reference is the policy before training")
    if uses_lora(source):
        return missing("with an adapter the reference is the model without it")
    return keep({"actor_rollout_ref.ref.path": placed("actor_rollout_ref.ref.path", value, source)})


def _loaded_adapter(value: Any, source: SourceConfig) -> Outcome:
    if uses_lora(source):
        return named(f"{MODEL}.lora_adapter_path")(value, source)
    return missing("set model.lora_adapter_path to it, and model.lora_rank to the rank it has")


OWN_RULES: dict[str, Rule] = {
    "ref_model": _reference,
    "adapter": _loaded_adapter,
    "merged_adapter": refused("save the merged model, and name it in model.path"),
    "load_dataset": refused("a further dataset: name it in data.train_files or data.val_files"),
    "callbacks": never(_CALLBACKS),
    "benchmarks": never(_OPEN_R1),
    "wandb_project": name_of("trainer.project_name"),
    "wandb_entity": always("the account that is logged in"),
    "project_name": name_of("trainer.project_name"),
    "optim_target_modules": never("AdamW is the optimizer of all weights that are trained"),
    "eval_dataset": _evaluated,
    "tools": refused("put them into a Python file: rollout.multi_turn.function_tool_path"),
    "rollout_func": refused(_ROLLOUTS),
    "environment_factory": refused(_ROLLOUTS),
    "optimizers": refused("AdamW, adamw_8bit and muon are the optimizers"),
    "formatting_func": refused(_CHANGED),
    "data_collator": refused("rows are rendered by the chat template, and packed"),
    "compute_metrics": refused("`luyen eval` measures checkpoints"),
    **{f"dataset.{name}": refused(_CHANGED) for name in _CHANGES},
    "dataset.train_test_split": refused(
        "all rows are trained on: split rows off into a file, and name it in data.val_files"
    ),
    "dataset.shuffle": always("rows are shuffled"),
    "use_gradient_checkpointing": _checkpointing,
    "random_state": always("numbers of a new adapter follow trainer.seed"),
    **{name: always("the loader of weights is Luyen's") for name in _LOADING},
}


# A Python file by its syntax tree.


def read_python(tree: ast.Module, source: SourceConfig, file: str) -> SourceConfig:
    """The arguments of TRL's configurations, adapters and datasets in a file."""
    known = constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _called(call) in CONFIGS]
    named = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in CONFIGS]
    methods = list(dict.fromkeys(CONFIGS[name] for name in map(_called, configs)))
    methods = methods or list(dict.fromkeys(CONFIGS[name] for name in named))
    if not methods:
        trainers = [_called(call).replace("Trainer", "Config") for call in calls]
        methods = list(dict.fromkeys(CONFIGS[name] for name in trainers if name in CONFIGS))
        configs = [call for call in calls if _called(call) == "TrainingArguments"]
    if len(methods) != 1:
        said = f"it configures {' and '.join(methods)}" if methods else "no configuration of TRL"
        fix = "give a file with one of " + ", ".join(CONFIGS)
        raise UserError("source", file, said, fix)
    values: dict[str, Any] = {}
    for call in configs:
        values |= _keywords(call, known)
    values |= _assigned_later(tree, configs, known)
    values |= _other_calls(calls, known, values)
    defaults: dict[str, Any] = {}
    rewards = values.get("reward_funcs")
    if rewards is not None and is_importable(tree) and defines(tree, rewards):
        defaults["reward file"] = str(Path(file).absolute())
    found = _source(values, methods[0], source, is_python=True)
    return replace(found, defaults={**found.defaults, **defaults})


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _keywords(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        value = value_of(keyword.value, known)
        if keyword.arg is None and isinstance(value, dict):
            values |= flat(cast(dict[str, Any], value))
        elif keyword.arg is None:
            values[f"**{ast.unparse(keyword.value)}"] = f"{OPEN}{ast.unparse(keyword.value)}"
        else:
            values |= flat({keyword.arg: value})
    return values


def _assigned_later(
    tree: ast.Module, configs: Sequence[ast.Call], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Keys that are set on the object after it was made."""
    made = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and node.value in configs
        and isinstance(node.targets[0], ast.Name)
    }
    values: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=key)]) if (
                name in made
            ):
                values |= flat({key: value_of(node.value, known)})
            case ast.Call(
                func=ast.Name(id="setattr"),
                args=[ast.Name(id=name), ast.Constant(value=str(key)), value],
            ) if name in made:
                values |= flat({key: value_of(value, known)})
            case _:
                continue
    return values


def _other_calls(
    calls: Sequence[ast.Call], known: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """What adapters, quantisation, models, datasets and trainers are given."""
    found: dict[str, Any] = {}
    first = ""
    for call in calls:
        name = _called(call)
        if name in ("LoraConfig", "get_peft_model") and call.keywords:
            words = _keywords(call, known)
            found |= {_ADAPTER.get(key, key): value for key, value in words.items()}
            found["use_peft"] = True
        elif name == "BitsAndBytesConfig":
            found |= _keywords(call, known)
        elif name == "load_dataset" and "dataset_name" not in found and "dataset_path" not in found:
            found |= _dataset(call, known)
            first = ast.unparse(call)
        elif name == "load_dataset" and ast.unparse(call) != first:
            found["load_dataset"] = ast.unparse(call)
        elif name.endswith("Trainer"):
            found |= _trainer(call, known)
        elif name == "from_pretrained" and _loads_policy(call):
            found = {**_policy(call, known), **found}
        elif name == "from_pretrained" and "PeftModel" in (loader := ast.unparse(call.func)):
            merges = any(_called(other) == "merge_and_unload" for other in calls)
            place = call.args[:1] if "AutoPeftModel" in loader else call.args[1:2]
            for node in place:
                found["merged_adapter" if merges else "adapter"] = value_of(node, known)
    found |= _changes_of_rows(calls)
    taken = {SYNONYMS.get(key, key) for key in values}
    return {key: v for key, v in found.items() if SYNONYMS.get(key, key) not in taken}


def _policy(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    """Where a policy is loaded from, and how."""
    words = _keywords(call, known)
    paths = [words.pop(name) for name in _PATH_WORDS if name in words]
    paths += [value_of(call.args[0], known)] if call.args else []
    words = {key: value for key, value in words.items() if key not in ("quantization_config",)}
    if "revision" in words:
        words["model_revision"] = words.pop("revision")
    return {**({"model_name_or_path": paths[0]} if paths and paths[0] else {}), **words}


def _changes_of_rows(calls: Sequence[ast.Call]) -> dict[str, Any]:
    """Methods of datasets that the script calls, each with its first call."""
    if not any(_called(call) in _DATASETS for call in calls):
        return {}
    found: dict[str, Any] = {}
    for call in calls:
        name = _called(call)
        is_method = isinstance(call.func, ast.Attribute)
        if is_method and name in (*_CHANGES, "train_test_split", "shuffle"):
            found.setdefault(f"dataset.{name}", ast.unparse(call))
    return found


def _loads_policy(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in _LOADERS
    )


def _trainer(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    words = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    # A value, and how the script writes it.
    given = {name: (value_of(node, known), ast.unparse(node)) for name, node in words.items()}
    for keyword in call.keywords:
        table = value_of(keyword.value, known) if keyword.arg is None else None
        if isinstance(table, dict):
            given |= {n: (v, str(v)) for n, v in cast(dict[str, Any], table).items()}
    if call.args:
        given["model"] = (value_of(call.args[0], known), "")
    for name, (value, text) in given.items():
        if name == "model" and isinstance(value, str) and not is_open(value):
            found["model_name_or_path"] = value
        elif name == "ref_model" and value is not None:
            found["ref_model"] = value
        elif name == "reward_funcs" and name in words:
            node = words[name]
            parts = node.elts if isinstance(node, ast.List) else [node]
            found[name] = [ast.unparse(part).strip("'\"") for part in parts]
        elif name in _TRAINER_KEYS:
            found[name] = value
        elif name in _TRAINER_OBJECTS and value is not None:
            found[name] = text.removeprefix(OPEN)
    return found


def _dataset(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    words = _keywords(call, known)
    first = value_of(call.args[0], known) if call.args else words.get("path")
    if first in ("json", "parquet", "csv"):
        rows = {
            "dataset_path": words.get("data_files", words.get("data_files.train")),
            "eval_dataset_path": words.get("data_files.validation", words.get("data_files.test")),
        }
        return {key: value for key, value in rows.items() if value is not None}
    if not isinstance(first, str):
        return {}
    second = value_of(call.args[1], known) if len(call.args) > 1 else words.get("name")
    found = {"dataset_name": first}
    found |= {"dataset_config": second} if second is not None else {}
    return found | ({"dataset_train_split": words["split"]} if "split" in words else {})
