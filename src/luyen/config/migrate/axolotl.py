"""Axolotl: a YAML file of `axolotl train`, its `datasets` and its `trl` block included."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from luyen.config.migrate.common import OPTIM, always, choose, name_of, named, never
from luyen.config.migrate.dialect import entries as dialect_entries
from luyen.config.migrate.dialect import listed_rows
from luyen.config.migrate.method_keys import stage_of
from luyen.config.migrate.report import (
    Entry,
    Outcome,
    Rule,
    SourceConfig,
    flat,
    implied,
    keep,
    missing,
)
from luyen.config.migrate.trainer_keys import RULES as TRAINER
from luyen.config.migrate.trainer_keys import STEPS_OF_EPOCH

TOOL = "Axolotl"
SYNONYMS = {
    "base_model": "model_name_or_path",
    "tokenizer_config": "tokenizer_name",
    "revision_of_model": "model_revision",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "lora_modules_to_save": "modules_to_save",
    "wandb_name": "run_name",
    "eval_batch_size": "per_device_eval_batch_size",
    "val_set_size": "val_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.max_model_len": "vllm_max_model_length",
    "trl.vllm_max_model_len": "vllm_max_model_length",
    "excess_length_strategy": "truncation_mode",
    "evaluation_strategy": "eval_strategy",
}
_METHODS = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo", "gdpo", "bco")
_DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.0,
    "max_length": 512,
    "warmup_ratio": 0.03,
    "seed": 42,
    "lora_r": 8,
    "lora_alpha": 16,
}
_BY_METHOD: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 8, "max_completion_length": 256, "loss_type": "dapo", "beta": 0.0},
    "gdpo": {"num_generations": 8, "max_completion_length": 256, "loss_type": "dapo", "beta": 0.0},
    **{name: {"beta": 0.1} for name in ("dpo", "ipo", "kto", "orpo", "bco")},
    "simpo": {"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0},
}


def is_axolotl(values: Mapping[str, Any]) -> bool:
    """Whether a YAML file is one of Axolotl."""
    return "base_model" in values


def method_of(values: Mapping[str, Any]) -> str:
    """What a file trains."""
    if values.get("process_reward_model"):
        return "prm"
    if values.get("reward_model"):
        return "reward"
    rl = str(values.get("rl") or "sft")
    return rl if rl in _METHODS else "sft"


def read_yaml(values: Mapping[str, Any], source: SourceConfig) -> SourceConfig:
    """The keys of a file, those of `trl` as TRL names them."""
    method, found = method_of(values), flat(values)
    names = {key: SYNONYMS.get(key, SYNONYMS.get(_inner(key), _inner(key))) for key in found}
    chosen: dict[str, str] = {}
    for key in found:
        name = names[key]
        is_free = name not in chosen or found[chosen[name]] is None
        chosen[name if is_free else key] = key
    kind = values.get("adapter")
    defaults = {**_DEFAULTS, **_BY_METHOD.get(method, {}), "use_peft": kind is not None}
    if found.get("warmup_steps") is not None:
        del defaults["warmup_ratio"]  # a number of steps is meant, 0 too
    return replace(
        source,
        tool=TOOL,
        method=method,
        values={name: found[key] for name, key in chosen.items()},
        written=chosen,
        defaults=defaults,
    )


def _inner(key: str) -> str:
    return key.removeprefix("trl.")


def entries(source: SourceConfig) -> list[Entry]:
    """What becomes of every key."""
    return dialect_entries(source, RULES)


# Rows.


_PLAIN = ("alpaca", "chat_template", "sharegpt", "completion", "llama3", "chatml", "orpo", "zephyr")


def _type(value: Any, source: SourceConfig) -> Outcome:
    del source
    word = str(value).partition(".")[0]
    if word in (*_PLAIN, "bradley_terry", "stepwise_supervised", "input_output", "prompt_style"):
        return implied("the format of rows is known by their columns: `luyen data inspect FILE`")
    return missing("rows are read as they are: apply this transform, and write a file of rows")


def _checkpointing(value: Any, source: SourceConfig) -> Outcome:
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if isinstance(value, str) and value:
        return keep({key: True}, f"{value}: layers are computed again, nothing leaves the device")
    return named(key)(value, source)


_OWN_ROWS = "rows of an own format: write them as `messages`, with the text that stands around them"
_COLUMNS = "rows are read by the columns that a format has: `luyen data inspect FILE`"


def _adapter(value: Any, source: SourceConfig) -> Outcome:
    if value not in ("lora", "qlora"):
        return missing("all weights are trained, or a LoRA adapter")
    note = "the base is not quantised" if value == "qlora" else ""
    rank = int(source.get("lora_r") or 8)
    return keep({"actor_rollout_ref.model.lora_rank": rank}, note)


def _all_linear(value: Any, source: SourceConfig) -> Outcome:
    if not value:
        return implied("lora_target_modules decides")
    if not source.get("use_peft") or source.method in ("reward", "prm"):
        return implied("all weights are trained")
    return keep({"actor_rollout_ref.model.target_modules": ["all-linear"]})


def _modules(value: Any, source: SourceConfig) -> Outcome:
    if source.get("lora_target_linear"):
        return implied("lora_target_linear takes all linear layers")
    return TRAINER["lora_target_modules"](value, source)


def _learned(value: Any, source: SourceConfig) -> Outcome:
    if source.method != "sft":
        return implied("this stage learns answers only")
    return missing("prompts are not learned") if value else keep({"sft.learn": "assistant"})


def _method(value: Any, source: SourceConfig) -> Outcome:
    if value in _METHODS or source.method in ("reward", "prm"):
        return keep(stage_of(source))
    return missing(f"no method {value}: read as supervised training")


def _special(value: Any, source: SourceConfig) -> Outcome:
    del value, source
    return implied("there is no padding")


def _sharded(value: Any, source: SourceConfig) -> Outcome:
    del value, source
    return implied("weights are sharded over trainer.n_gpus_per_node devices (fsdp2)")


def _divided(ours: str) -> Rule:
    """Devices that divide a layer or a row, where there are several."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        del source
        if value in (None, 0, 1):
            return implied("off, as it is")
        return keep({f"actor_rollout_ref.actor.fsdp_config.{ours}": int(value)})

    return rule


_KERNELS = "kernels, memory and padding are the engine's: batches are packed, layers fused"
_FUSED = (
    *("use_kernels", "use_scattermoe", "use_sonicmoe", "chunked_cross_entropy", "liger_rope"),
    *("cut_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
    *("liger_rms_norm", "liger_glu_activation", "liger_layer_norm"),
    *("liger_fused_linear_cross_entropy", "liger_cross_entropy"),
)
_PER_EPOCH = f"set it in steps: an epoch has {STEPS_OF_EPOCH}"
_TOKENS = "put them into a copy of the tokenizer: model.tokenizer_path"
RULES: dict[str, Rule] = {
    "rl": _method,
    "reward_model": _method,
    "process_reward_model": _method,
    **{
        f"{block}[].{name}": listed_rows(block, ours)
        for block, ours in (("datasets", "data.train_files"), ("test_datasets", "data.val_files"))
        for name in ("path", "name", "split", "data_files", "ds_type")
    },
    "datasets[].type": _type,
    "test_datasets[].type": _type,
    **{
        f"{block}[].type.{name}": never(_OWN_ROWS)
        for block in ("datasets", "test_datasets")
        for name in (
            *("field_system", "field_instruction", "field_input", "field_output", "field"),
            *("format", "no_input_format", "system_format", "system_prompt"),
        )
    },
    "gradient_checkpointing": _checkpointing,
    **{
        f"{block}[].{name}": always(_COLUMNS)
        for block in ("datasets", "test_datasets")
        for name in (
            *("field_messages", "field_chosen", "field_rejected", "message_field_role"),
            *("message_field_content", "message_property_mappings.role", "conversation"),
            *("message_property_mappings.content", "roles.system", "roles.user", "field"),
            *("roles.assistant", "roles_to_train", "train_on_eos", "chat_template", "roles.tool"),
        )
    },
    "val_size": never("split rows off into a file, and name it in data.val_files"),
    "adapter": _adapter,
    "lora_target_linear": _all_linear,
    "lora_target_modules": _modules,
    "lora_model_dir": named("actor_rollout_ref.model.lora_adapter_path"),
    "lora_fan_in_fan_out": never("linear layers only"),
    "train_on_inputs": _learned,
    "cosine_min_lr_ratio": named(f"{OPTIM}.min_lr_ratio"),
    "evals_per_epoch": never(f"trainer.test_freq: {_PER_EPOCH}"),
    "saves_per_epoch": never(f"trainer.save_freq: {_PER_EPOCH}"),
    "special_tokens.pad_token": _special,
    **{
        f"special_tokens.{name}": never(_TOKENS) for name in ("eos_token", "bos_token", "unk_token")
    },
    "tokens": never(_TOKENS),
    "eot_tokens": always("the end of a turn is that of the chat template"),
    "base_model_config": always("the architecture is that of config.json"),
    "model_type": always("the architecture is that of config.json"),
    "tokenizer_type": always("the tokenizer is that of its files"),
    "num_labels": always("a reward model has one score"),
    "is_llama_derived_model": always("the architecture is that of config.json"),
    "strict": always("every key is checked"),
    "eval_sample_packing": always("validation measures every row"),
    "eval_table_size": never("`luyen eval` generates from a checkpoint"),
    "eval_max_new_tokens": always("`luyen eval` generates from a checkpoint"),
    "loss_watchdog_threshold": never("`luyen doctor` looks at a run"),
    "loss_watchdog_patience": always("`luyen doctor` looks at a run"),
    "early_stopping_patience": never("set trainer.early_stopping: its metric and its patience"),
    "wandb_project": name_of("trainer.project_name"),
    "wandb_entity": always("the account that is logged in"),
    "wandb_watch": always("gradients are metrics"),
    "wandb_log_model": never("`luyen artifacts` lists what a run made"),
    "unfrozen_parameters": never("all weights are trained, or a LoRA adapter"),
    "dft": choose(bool, keep({"sft.loss": "dft"}), implied("nll")),
    "use_dft_loss": choose(bool, keep({"sft.loss": "dft"}), implied("nll")),
    "plugins": never("extensions of Axolotl: trainer.plugins takes those of Luyen"),
    **{
        f"fsdp_config.{prefix}{name}": always("shards are laid out by actor.fsdp_config of RL runs")
        for prefix in ("", "fsdp_")
        for name in (
            *("limit_all_gathers", "sync_module_states", "offload_params", "use_orig_params"),
            *("cpu_ram_efficient_loading", "auto_wrap_policy", "sharding_strategy"),
            *("transformer_layer_cls_to_wrap", "state_dict_type", "reshard_after_forward"),
            *("final_state_dict_type", "mixed_precision_policy"),
        )
    },
    "fsdp_config.activation_checkpointing": named(
        "actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "fsdp_version": always("weights are sharded by fsdp2"),
    **dict.fromkeys(("dp_shard_size", "dp_replicate_size"), _sharded),
    "tensor_parallel_size": _divided("tensor_parallel_size"),
    **{
        name: _divided("ulysses_sequence_parallel_size")
        for name in ("context_parallel_size", "sequence_parallel_degree")
    },
    **{name: always(_KERNELS) for name in _FUSED},
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": always(_KERNELS),
    "experimental_skip_move_to_device": always("the loader of weights is Luyen's"),
    "shuffle_merged_datasets": choose(
        bool, implied("all rows are shuffled"), missing("set data.sampler.name=sequential")
    ),
    "use_onebitllms": never("weights are not ternary"),
}
