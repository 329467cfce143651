"""LLaMA-Factory: a YAML file of `llamafactory-cli train`, with the `dataset_info.json` it names."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.input_files import is_file, read_text
from luyen.config.migrate.common import NO_EFFECT, SAME_BASE, always, choose, mapped, named, never
from luyen.config.migrate.dialect import address
from luyen.config.migrate.dialect import entries as dialect_entries
from luyen.config.migrate.method_keys import ONLINE_RULES, stage_of
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

TOOL = "LLaMA-Factory"
_METHODS = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
_LOSSES = {"orpo": "orpo", "simpo": "simpo", "ipo": "ipo"}
SYNONYMS = {
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules",
    "cutoff_len": "max_length",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "pref_ftx": "rpo_alpha",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "max_new_tokens": "max_completion_length",
    "ppo_epochs": "num_ppo_epochs",
    "evaluation_strategy": "eval_strategy",
    "neat_packing": "packing",
}
_DEFAULTS: dict[str, Any] = {
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": "all",
    "max_length": 2048,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "save_steps": 500,
    "seed": 42,
}
_BY_METHOD: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_ppo_epochs": 4,
        "beta": 0.2,
        "ppo_target": 6.0,
        "lam": 0.95,
        "cliprange_value": 0.2,
        "max_completion_length": 1024,
        "temperature": 0.95,
        "top_p": 0.7,
        "top_k": 50,
    },
    **{name: {"beta": 0.1} for name in ("dpo", "kto", "orpo", "simpo", "ipo")},
    "simpo": {"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
}


def is_llama_factory(values: Mapping[str, Any]) -> bool:
    """Whether a YAML file is one of LLaMA-Factory."""
    marks = ("finetuning_type", "cutoff_len", "lora_target", "pref_beta", "lora_rank", "stage")
    return any(mark in values for mark in marks) and "model_name_or_path" in values


def read_yaml(values: Mapping[str, Any], source: SourceConfig) -> SourceConfig:
    """The keys of a file; a UserError for a stage that does not train."""
    stage = str(values.get("stage", "sft"))
    if stage not in _METHODS:
        fix = f"give a file of one of {', '.join(_METHODS)}"
        raise UserError("stage", stage, "no stage of LLaMA-Factory that trains", fix)
    method = _METHODS[stage]
    method = _LOSSES.get(str(values.get("pref_loss")), method) if method == "dpo" else method
    found = flat(values)
    named_ = {SYNONYMS.get(key, key): value for key, value in found.items()}
    kind = str(found.get("finetuning_type", "lora"))
    rank = int(named_.get("lora_r") or 8)
    defaults = {**_DEFAULTS, **_BY_METHOD.get(method, {}), "use_peft": kind == "lora"}
    defaults["lora_alpha"] = 2 * rank
    return replace(
        source,
        tool=TOOL,
        method=method,
        values=named_,
        written={SYNONYMS.get(key, key): key for key in found},
        defaults=defaults,
    )


def entries(source: SourceConfig) -> list[Entry]:
    """What becomes of every key."""
    return dialect_entries(source, RULES)


# Rows: names of `dataset_info.json`.


def _info(source: SourceConfig) -> dict[str, Any] | None:
    """The catalogue of datasets, where it is here."""
    folder = str(source.get("dataset_dir") or "data")
    for place in (Path(source.folder) / folder, Path(folder), Path(source.folder)):
        file = place / "dataset_info.json"
        if is_file(str(file)):
            try:
                found = json.loads(read_text(file))
            except (OSError, ValueError, RecursionError) as error:
                why, fix = f"cannot be read: {error}", "correct the file"
                raise UserError("dataset_info.json", str(file), why, fix) from error
            if not isinstance(found, dict):
                raise UserError(
                    "dataset_info.json", str(file), "it is no mapping", "correct the file"
                )
            return cast(dict[str, Any], found)
    return None


def _rows(ours: str) -> Rule:
    def rule(value: Any, source: SourceConfig) -> Outcome:
        listed = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
        info, found, notes = _info(source), list[str](), list[str]()
        for name in (str(one).strip() for one in listed):
            path, note = _one(name, info, source)
            found.append(path)
            notes += [note] if note else []
        return keep({ours: found}, "; ".join(dict.fromkeys(notes)))

    return rule


def _one(name: str, info: Mapping[str, Any] | None, source: SourceConfig) -> tuple[str, str]:
    folder = str(source.get("dataset_dir") or "data")
    if info is None:
        guess = source.place(f"{folder}/{name}.json")
        return guess, f"{folder}/dataset_info.json is not here, so the file is a guess"
    if name not in info:
        return source.place(f"{folder}/{name}.json"), f"dataset_info.json has no {name}"
    entry = cast(Mapping[str, Any], info[name] if isinstance(info[name], Mapping) else {})
    hub = entry.get("hf_hub_url")
    if hub is not None:
        split, config = str(entry.get("split", "train")), entry.get("subset")
        has_columns = any(key in entry for key in ("columns", "tags"))
        note = "columns of hub datasets are read by known names only: `luyen data inspect`"
        return address(str(hub), source, split=split, config=config), note if has_columns else ""
    if "file_name" not in entry:
        return source.place(f"{folder}/{name}.json"), f"{name} is neither a file nor on the hub"
    note = "dataset_info.json in the folder of the file says how its rows are read"
    return source.place(f"{folder}/{entry['file_name']}"), note


def _names(source: SourceConfig) -> list[str]:
    listed = source.get("dataset") or ""
    parts = cast(list[Any], listed) if isinstance(listed, list) else str(listed).split(",")
    return [str(part).strip() for part in parts]


def _most(value: Any, source: SourceConfig) -> Outcome:
    count = len(_names(source))
    if count > 1:
        return keep({"data.train_file_samples": [int(value)] * count})
    return keep({"data.train_max_samples": int(value)})


_PASSES = "an epoch is as many rows as all files have"


def _mixed(value: Any, source: SourceConfig) -> Outcome:
    count = len(_names(source))
    if value == "concat" or count == 1:
        return implied("files follow each other, shuffled")
    if source.has("interleave_probs"):
        return keep({"data.train_weights": _shares(source.get("interleave_probs"))}, _PASSES)
    return keep({"data.train_weights": [1.0] * count}, _PASSES)


def _shares(value: Any) -> list[float]:
    listed = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    return [float(one) for one in listed]


def _probabilities(value: Any, source: SourceConfig) -> Outcome:
    if source.get("mix_strategy") in (None, "concat") or len(_names(source)) == 1:
        return implied("files follow each other, shuffled")
    return keep({"data.train_weights": _shares(value)}, _PASSES)


def _bits(value: Any, source: SourceConfig) -> Outcome:
    if value != 4 or source.get("quantization_method") not in (None, "bnb", "bitsandbytes"):
        return missing("weights are 4-bit numbers of bitsandbytes, or not quantised")
    return TRAINER["load_in_4bit"](True, source)


def _double(value: Any, source: SourceConfig) -> Outcome:
    if not source.has("quantization_bit") or not _bits(source.get("quantization_bit"), source).keys:
        return implied("weights are not quantised")
    return keep({"actor_rollout_ref.model.double_quantization": bool(value)})


def _kind(value: Any, source: SourceConfig) -> Outcome:
    if value == "full":
        return implied("all weights are trained")
    if value == "lora":
        rank = int(source.get("lora_r") or 8)
        return keep({"actor_rollout_ref.model.lora_rank": rank})
    return missing(f"{value}: all weights are trained, or a LoRA adapter")


def _stage(value: Any, source: SourceConfig) -> Outcome:
    note = "plain text, all of it learned: rows have `text`" if value == "pt" else ""
    return keep(stage_of(source), note)


def _learned(value: Any, source: SourceConfig) -> Outcome:
    del source
    return missing("prompts are not learned") if value else keep({"sft.learn": "assistant"})


def _history(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep({"sft.learn": "last_turn"}) if value else keep({"sft.learn": "assistant"})


def _reward_model(value: Any, source: SourceConfig) -> Outcome:
    outcome = ONLINE_RULES["reward_model"](value, source)
    is_whole = source.get("reward_model_type") == "full"
    return outcome if is_whole else replace(outcome, note="an adapter has to be merged first")


def _reward_kind(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value == "full":
        return implied("a whole reward model")
    return missing("the reward model is a folder with all its weights: merge the adapter")


_TRICKS = "AdamW trains all weights, or a LoRA adapter"
RULES: dict[str, Rule] = {
    "stage": _stage,
    "finetuning_type": _kind,
    "dataset": _rows("data.train_files"),
    "eval_dataset": _rows("data.val_files"),
    "dataset_dir": always("the folder of the files of rows"),
    "max_samples": _most,
    "val_size": never("split rows off into a file, and name it in data.val_files"),
    "train_on_prompt": _learned,
    "mask_history": _history,
    "use_dft_loss": choose(bool, keep({"sft.loss": "dft"}), implied("nll")),
    "pure_bf16": choose(
        bool,
        keep({"actor_rollout_ref.model.dtype": "bfloat16"}, "bfloat16 weights have fp32 masters"),
        implied("off, as it is"),
    ),
    "adapter_name_or_path": named("actor_rollout_ref.model.lora_adapter_path"),
    "quantization_bit": _bits,
    "quantization_method": always("quantization_bit decides"),
    "double_quantization": _double,
    "reward_model": _reward_model,
    "reward_model_type": _reward_kind,
    "ppo_score_norm": never("advantages are whitened, scores are not"),
    "additional_target": never("an adapter is all that is trained"),
    "rope_scaling": never("set it in actor_rollout_ref.model.override_config"),
    "sequence_parallel_size": named(
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "sequence_parallel_mode": always("ranks exchange tokens for heads (Ulysses)"),
    "enable_thinking": mapped(
        lambda value: {"data.apply_chat_template_kwargs": {"enable_thinking": value}}
    ),
    "mix_strategy": _mixed,
    "interleave_probs": _probabilities,
    "streaming": always("rows that are larger than memory are kept on disk"),
    "buffer_size": always("all rows are shuffled, not a part of them"),
    "default_system": named("data.system_prompt"),
    "ray_run_name": always("trainer.experiment_name"),
    "pissa_init": never(SAME_BASE),
    "loraplus_lr_ratio": never("both matrices of an adapter have one learning rate"),
    **{
        name: never(_TRICKS)
        for name in (
            *(
                "use_galore",
                "use_apollo",
                "use_badam",
                "use_adam_mini",
                "use_muon",
                "use_llama_pro",
            ),
            *("mixture_of_depths", "shift_attn", "fp8", "freeze_trainable_layers"),
            *("freeze_trainable_modules", "freeze_extra_modules"),
        )
    },
    **{
        name: always("part of what is not available")
        for name in (
            *(
                "galore_layerwise",
                "galore_target",
                "galore_rank",
                "galore_scale",
                "galore_interval",
            ),
            *("pissa_iter", "pissa_convert", "badam_mode", "badam_switch_mode"),
            *("badam_switch_interval", "badam_verbose", "apollo_layerwise", "apollo_target"),
            *("apollo_rank", "apollo_scale", "apollo_scale_type", "apollo_update_interval"),
        )
    },
    "use_v1_kernels": always(NO_EFFECT["flash_attn"]),
    "disable_gradient_checkpointing": mapped(
        lambda value: {"actor_rollout_ref.model.enable_gradient_checkpointing": not value}
    ),
}
