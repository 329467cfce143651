"""Keys that TRL, LLaMA-Factory and Axolotl share, since all of them build on one Trainer.

Names are those of TRL; `llama_factory` and `axolotl` translate theirs into them. Sizes there are
for one device and count what one pass holds; ours count a step of the whole run.
"""

from collections.abc import Mapping
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.config.migrate.common import (
    HUB_KEYS,
    NO_EFFECT,
    OPTIM,
    adapter_init,
    always,
    choose,
    logger,
    name_of,
    named,
    never,
    no_dropout,
    scheduler,
)
from luyen.config.migrate.report import Outcome, Rule, SourceConfig, implied, keep, missing

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ONLINE = ("grpo", "gdpo", "rloo", "ppo")
PAIRED = ("dpo", "ipo", "orpo", "cpo", "simpo")
MARKED = ("kto", "bco")
SCORED = ("reward", "prm")
STEPS_OF_EPOCH = "as many as rows / data.train_batch_size"


def is_online(source: SourceConfig) -> bool:
    """Whether answers are sampled."""
    return source.method in ONLINE


# Batches and length of the run.


def _count(source: SourceConfig, *keys: str) -> int:
    """The first of these keys that has a value, else 1; a UserError where it is no number."""
    for key in keys:
        value = source.get(key)
        if value:
            name, fix = source.written.get(key, key), "write the number that it stands for"
            try:
                count = int(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(name, value, "it is no whole number", fix) from error
            if count < 1:
                raise UserError(name, value, "it is not above 0", fix)
            return count
    return 1


def rows_of_update(source: SourceConfig) -> int:
    """Rows of one optimizer step over all devices; of answers that are sampled, answers."""
    each = _count(source, "per_device_train_batch_size")
    return each * _count(source, "gradient_accumulation_steps") * source.devices


def group_size(source: SourceConfig) -> int:
    """Answers to one prompt."""
    return 1 if source.method == "ppo" else _count(source, "num_generations")


def rows_of_generation(source: SourceConfig) -> int:
    """Answers that are sampled with the same weights."""
    if source.method == "ppo":
        return rows_of_update(source) * _count(source, "num_mini_batches", "ppo_buffer_size")
    if source.get("generation_batch_size"):
        return _count(source, "generation_batch_size")
    each = _count(source, "per_device_train_batch_size") * source.devices
    return each * _count(source, "steps_per_generation", "gradient_accumulation_steps")


def updates_of_step(source: SourceConfig) -> int:
    """Optimizer steps that the Trainer counts in one step of ours."""
    if not is_online(source):
        return 1
    passes = _count(source, "num_iterations", "num_ppo_epochs")
    return max(1, rows_of_generation(source) // rows_of_update(source)) * passes


def sizes(value: Any, source: SourceConfig) -> Outcome:
    """All keys of batch sizes together give those of ours."""
    del value
    update, devices = rows_of_update(source), source.devices
    each = source.get("per_device_train_batch_size") or 1
    words = f"{each} x {source.get('gradient_accumulation_steps') or 1} x {devices} devices"
    if not is_online(source):
        return keep({"data.train_batch_size": update}, f"{words} = {update} rows a step")
    group = group_size(source)
    whole = max(rows_of_generation(source), update)
    prompts, mini = -(-whole // group), -(-update // group)
    note = f"{words} = {update} answers an update, {group} to a prompt"
    if update % group or whole % group:
        note += ": no whole number of prompts, rounded up"
    prompts = -(-prompts // mini) * mini
    return keep({"data.train_batch_size": prompts, f"{ACTOR}.ppo_mini_batch_size": mini}, note)


def _group(value: Any, source: SourceConfig) -> Outcome:
    keys = {"actor_rollout_ref.rollout.n": int(value), **sizes(value, source).keys}
    return keep(keys, sizes(value, source).note)


def _passes(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep({f"{ACTOR}.ppo_epochs": int(value)})


def _steps(value: Any, source: SourceConfig) -> Outcome:
    if value is None or value <= 0:
        return implied("epochs decide")
    updates = updates_of_step(source)
    note = f"{updates} optimizer steps there are one step here" if updates > 1 else ""
    return keep({"trainer.total_training_steps": -(-int(value) // updates)}, note)


def _epochs(value: Any, source: SourceConfig) -> Outcome:
    if (source.get("max_steps") or -1) > 0:
        return implied("max_steps decides")
    if float(value) < 1 or not float(value).is_integer():
        why = f"{value} is no whole number of passes: set trainer.total_training_steps"
        return missing(why)
    return keep({"trainer.total_epochs": int(value)})


def _every(ours: str) -> Rule:
    """A number of optimizer steps, or a share of the run."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        strategy = source.get("save_strategy" if ours.endswith("save_freq") else "eval_strategy")
        if strategy in ("epoch", "no", False):
            return implied(f"the strategy `{strategy}` does not read it")
        total = source.get("max_steps") or -1
        if value is None or value <= 0:
            return implied("not set")
        if value < 1 and total <= 0:
            return missing(f"a share of a run whose steps are not known: set {ours}")
        steps = int(value * total) if value < 1 else int(value)
        steps = max(1, steps // updates_of_step(source))
        if total > 0 and steps > -(-int(total) // updates_of_step(source)):
            return keep({ours: -1}, f"every {steps} steps never comes: only at the end")
        return keep({ours: steps})

    return rule


def _strategy(ours: str) -> Rule:
    def rule(value: Any, source: SourceConfig) -> Outcome:
        is_save = ours.endswith("save_freq")
        if value in ("no", False, None):
            note = "a checkpoint at the end is always written" if is_save else ""
            return keep({ours: -1}, note)
        if value == "epoch":
            return missing(f"set {ours} in steps: an epoch has {STEPS_OF_EPOCH}")
        every = source.get("save_steps" if is_save else "eval_steps")
        if every is None:
            return implied(f"{ours} has a default of its own")
        keys = _every(ours)(every, source).keys
        return Outcome(
            keys=keys, is_implied=True, note="" if keys else "the number of steps decides"
        )

    return rule


# Learning rate and optimizer.


def _warm_up_ratio(value: Any, source: SourceConfig) -> Outcome:
    if (source.get("warmup_steps") or 0) > 0:
        return implied("warmup_steps decides")
    return keep({f"{OPTIM}.lr_warmup_steps_ratio": float(value)})


def _warm_up_steps(value: Any, source: SourceConfig) -> Outcome:
    if value <= 0:
        return implied("none, unless there is a ratio")
    if value < 1:
        return keep({f"{OPTIM}.lr_warmup_steps_ratio": float(value)}, "below 1 it is a share")
    return keep({f"{OPTIM}.lr_warmup_steps": -(-int(value) // updates_of_step(source))})


def _least_rate(value: Any, source: SourceConfig) -> Outcome:
    rate = source.get("learning_rate")
    if not rate:
        return missing(f"set {OPTIM}.min_lr_ratio")
    return keep({f"{OPTIM}.min_lr_ratio": float(value) / float(rate)}, "as a share of the peak")


def _optimizer(value: Any, source: SourceConfig) -> Outcome:
    name = str(value)
    if name in ("adamw_torch", "adamw_torch_fused", "adamw", "adamw_hf", "adamw_apex_fused"):
        return implied("AdamW is the optimizer")
    if name == "paged_adamw_32bit":
        return implied("AdamW is the optimizer; its moments stay in one memory")
    is_eight = name in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit")
    if source.devices > 1 and (is_eight or name == "muon"):
        return missing(f"AdamW is used: several devices cannot share the state of {name}")
    if is_eight:
        if not source.installed("bitsandbytes"):
            return missing(f"bitsandbytes is not installed here: set {OPTIM}.name where it is")
        note = "its moments stay in one memory" if name.startswith("paged") else ""
        return keep({f"{OPTIM}.name": "adamw_8bit"}, note)
    if name == "muon":
        return keep({f"{OPTIM}.name": "muon"}, "its updates are as large as AdamW's: check the lr")
    if "adamw" in name:
        return missing("AdamW with fp32 moments is used: the same steps, more memory")
    return missing(f"AdamW is used; {OPTIM}.name has adamw_8bit and muon")


def _clip(value: Any, source: SourceConfig) -> Outcome:
    del source
    if not value:
        return keep({f"{OPTIM}.clip_grad": 1e9}, "no clipping")
    return keep({f"{OPTIM}.clip_grad": float(value)})


def _betas(value: Any, source: SourceConfig) -> Outcome:
    del value
    first, second = source.get("adam_beta1"), source.get("adam_beta2")
    betas = [0.9 if first is None else first, 0.999 if second is None else second]
    return keep({f"{OPTIM}.betas": [float(one) for one in betas]})


def _epsilon(value: Any, source: SourceConfig) -> Outcome:
    del source
    return implied("1e-8, as it is") if value in (None, 1e-8) else missing("AdamW's is 1e-8")


# Weights and adapters.


def uses_lora(source: SourceConfig) -> bool:
    """Whether an adapter is trained."""
    return bool(source.get("use_peft"))


def _adapter(rule: Rule) -> Rule:
    """A key of an adapter: it counts only where there is one."""

    def checked(value: Any, source: SourceConfig) -> Outcome:
        if not uses_lora(source):
            return implied("all weights are trained")
        return implied("not set") if value is None else rule(value, source)

    return checked


def _dropout(value: Any, source: SourceConfig) -> Outcome:
    off = no_dropout(source, is_online=is_online(source)) if float(value) > 0 else None
    return off or keep({f"{MODEL}.lora_dropout": float(value)})


def _dora(value: Any, source: SourceConfig) -> Outcome:
    if value and (is_online(source) or source.devices > 1 or source.get("load_in_4bit")):
        return missing("DoRA is trained on one device, over weights that are not quantised")
    return keep({f"{MODEL}.use_dora": bool(value)})


def _four_bits(value: Any, source: SourceConfig) -> Outcome:
    if not value:
        return implied("off, as it is")
    if not uses_lora(source) or source.method in SCORED:
        return missing("4-bit weights need an adapter over them, of a policy")
    where = f"set {MODEL}.quantization=nf4"
    if source.method in ONLINE or source.devices > 1:
        return missing(f"weights are not quantised; on one device {where}")
    if not source.installed("bitsandbytes"):
        return missing(f"bitsandbytes is not installed here: {where} where it is")
    return keep({f"{MODEL}.quantization": "nf4"})


def _nested(value: Any, source: SourceConfig) -> Outcome:
    if not _four_bits(source.get("load_in_4bit"), source).keys:
        return implied("weights are not quantised")
    return keep({f"{MODEL}.double_quantization": bool(value)})


def targets(value: Any, source: SourceConfig) -> Outcome:
    """Modules of an adapter."""
    del source
    names = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    listed = [str(name).strip() for name in names]
    ours = ["all-linear"] if listed in (["all"], ["all-linear"]) else listed
    return keep({f"{MODEL}.target_modules": ours})


def _peft(value: Any, source: SourceConfig) -> Outcome:
    if not value:
        return implied("all weights are trained")
    return keep({f"{MODEL}.lora_rank": int(source.get("lora_r") or 8)})


def _dtype(value: Any, source: SourceConfig) -> Outcome:
    del source
    name = str(value).removeprefix("torch.")
    if name in ("bfloat16", "bf16"):
        return keep({f"{MODEL}.dtype": "bfloat16"})
    if name in ("float32", "fp32"):
        return keep({f"{MODEL}.dtype": "float32"})
    if name in ("auto", "None"):
        return implied("auto: bfloat16 on CUDA, float32 on CPU")
    return missing("weights are bfloat16 or float32, and auto chooses")


def _bf16(value: Any, source: SourceConfig) -> Outcome:
    if value == "auto":
        return implied("auto: bfloat16 on CUDA, float32 on CPU")
    if value and not source.has("torch_dtype"):
        return keep({f"{MODEL}.dtype": "bfloat16"}, "with fp32 masters in the optimizer")
    if not value and not source.has("torch_dtype") and not source.get("fp16"):
        return keep({f"{MODEL}.dtype": "float32"})
    return implied("bfloat16 weights have fp32 masters; model.dtype says the type")


def _revision(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value in (None, "main"):
        return implied("main")
    return missing("download this revision, and give its folder as the path of the model")


def _split_length(value: Any, source: SourceConfig) -> Outcome:
    """Most tokens of a row: ours are given in two parts, whose sum counts."""
    if "max_length" in source.values and not source.has("max_length"):
        return missing("rows need a limit: set data.max_prompt_length and max_response_length")
    whole = source.get("max_length")
    prompt = source.get("max_prompt_length")
    answer = source.get("max_completion_length")
    if whole is None and answer is None:
        return missing("rows need a limit: set data.max_prompt_length and max_response_length")
    if whole is None:
        whole = int(answer) + int(prompt or 512)
    first = int(prompt) if prompt and int(prompt) < int(whole) else int(whole) // 2
    note = f"rows of more than {whole} tokens are dropped, not cut"
    del value
    return keep(
        {"data.max_prompt_length": first, "data.max_response_length": int(whole) - first}, note
    )


def _prompt_length(value: Any, source: SourceConfig) -> Outcome:
    if not is_online(source):
        return _split_length(value, source)
    if value is None:
        return missing("prompts need a limit: set data.max_prompt_length")
    return keep({"data.max_prompt_length": int(value)}, "longer prompts are dropped, not cut")


def _answer_length(value: Any, source: SourceConfig) -> Outcome:
    if not is_online(source):
        return _split_length(value, source)
    return keep({"data.max_response_length": int(value)})


def _length(value: Any, source: SourceConfig) -> Outcome:
    if not is_online(source):
        return _split_length(value, source)
    if source.has("max_prompt_length"):
        return implied("max_prompt_length and max_completion_length decide")
    answer = int(source.get("max_completion_length") or 0)
    prompt = int(value) - answer if int(value) > answer else int(value)
    return keep({"data.max_prompt_length": prompt}, "what the answer leaves of it")


def _packing(value: Any, source: SourceConfig) -> Outcome:
    if not value:
        return implied("a row of a batch is one conversation; there is no padding")
    length = source.get("max_length") or 1024
    return missing(
        f"a row of a batch is there a pack of up to {length} tokens, and here one conversation: "
        "multiply data.train_batch_size by conversations in a pack (`luyen data inspect` has "
        "lengths) for steps of as many tokens"
    )


# Running and saving.


def _sharded(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value in (None, "", [], {}):
        return implied("off, as it is")
    return implied("weights are sharded over trainer.n_gpus_per_node devices (fsdp2)")


def _devices(value: Any, source: SourceConfig) -> Outcome:
    del value
    return keep({"trainer.n_gpus_per_node": source.devices})


def _resume(value: Any, source: SourceConfig) -> Outcome:
    del source
    if isinstance(value, str) and value not in ("true", "false", "last"):
        return missing("checkpoints of another tool cannot be resumed: start from its weights")
    return implied("a run of the same name resumes")


_BEST = "set trainer.keep_best, trainer.best_metric and trainer.max_ckpt_to_keep"
_HUB = "`luyen export` writes a Hugging Face directory: upload that"

RULES: dict[str, Rule] = {
    **{key: always(why) for key, why in NO_EFFECT.items()},
    **{key: never(_HUB) for key in HUB_KEYS},
    "per_device_train_batch_size": sizes,
    "gradient_accumulation_steps": sizes,
    "generation_batch_size": sizes,
    "steps_per_generation": sizes,
    "num_mini_batches": sizes,
    "ppo_buffer_size": sizes,
    "num_processes": _devices,
    "num_generations": _group,
    "num_iterations": _passes,
    "num_ppo_epochs": _passes,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "save_steps": _every("trainer.save_freq"),
    "eval_steps": _every("trainer.test_freq"),
    "save_strategy": _strategy("trainer.save_freq"),
    "eval_strategy": _strategy("trainer.test_freq"),
    "do_eval": always("trainer.test_freq decides"),
    "eval_on_start": named("trainer.val_before_train"),
    "save_total_limit": named("trainer.max_ckpt_to_keep"),
    "load_best_model_at_end": never(_BEST),
    "metric_for_best_model": never(_BEST),
    "greater_is_better": always("trainer.best_mode, with trainer.keep_best"),
    "learning_rate": named(f"{OPTIM}.lr"),
    "lr_scheduler_type": lambda value, source: scheduler(str(value), source),
    "lr_scheduler_kwargs.min_lr_rate": named(f"{OPTIM}.min_lr_ratio"),
    "lr_scheduler_kwargs.min_lr": _least_rate,
    "lr_scheduler_kwargs.min_lr_ratio": named(f"{OPTIM}.min_lr_ratio"),
    "lr_scheduler_kwargs.num_decay_steps": never("wsd goes down in the last tenth of the steps"),
    "lr_scheduler_kwargs.num_stable_steps": always("wsd holds the rate until it goes down"),
    "warmup_ratio": _warm_up_ratio,
    "warmup_steps": _warm_up_steps,
    "weight_decay": named(f"{OPTIM}.weight_decay"),
    "max_grad_norm": _clip,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "adam_epsilon": _epsilon,
    "optim": _optimizer,
    "model_name_or_path": named(f"{MODEL}.path"),
    "model_revision": _revision,
    "tokenizer_name": named(f"{MODEL}.tokenizer_path"),
    "trust_remote_code": named(f"{MODEL}.trust_remote_code"),
    "torch_dtype": _dtype,
    "bf16": _bf16,
    "fp16": never("weights are bfloat16 or float32, and model.dtype=auto chooses"),
    "gradient_checkpointing": named(f"{MODEL}.enable_gradient_checkpointing"),
    "use_peft": _peft,
    "lora_r": _adapter(named(f"{MODEL}.lora_rank")),
    "lora_alpha": _adapter(named(f"{MODEL}.lora_alpha")),
    "lora_target_modules": _adapter(targets),
    "lora_dropout": _adapter(_dropout),
    "use_rslora": _adapter(named(f"{MODEL}.use_rslora")),
    "lora_task_type": always("the stage says what is trained"),
    "lora_bias": _adapter(never("an adapter has no bias")),
    "use_dora": _adapter(_dora),
    "init_lora_weights": _adapter(adapter_init),
    "modules_to_save": _adapter(never("an adapter is all that is trained")),
    "load_in_4bit": _four_bits,
    "load_in_8bit": never("weights are not quantised: bfloat16 takes twice the memory"),
    "use_bnb_nested_quant": _nested,
    "bnb_4bit_use_double_quant": _nested,
    "bnb_4bit_compute_dtype": always("products are computed in model.dtype"),
    "bnb_4bit_quant_type": choose(
        lambda value: value == "nf4", implied("4-bit weights are nf4"), missing("only nf4 is here")
    ),
    "max_length": _length,
    "max_prompt_length": _prompt_length,
    "max_completion_length": _answer_length,
    "packing": _packing,
    "deepspeed": _sharded,
    "fsdp": _sharded,
    "seed": named("trainer.seed"),
    "data_seed": named("data.seed"),
    "report_to": logger,
    "run_name": name_of("trainer.experiment_name"),
    "output_dir": named("trainer.default_local_dir"),
    "resume_from_checkpoint": _resume,
    "group_by_length": never("rows are shuffled: data.sampler.name has the orders there are"),
    "neftune_noise_alpha": never("no noise is added to embeddings"),
    "label_smoothing_factor": never("the likelihood is not smoothed"),
    "chat_template_path": never("give the tokenizer with this template as model.tokenizer_path"),
    "ignore_data_skip": always("a resumed run takes the rows that follow"),
}
"""Key of the Trainer or of TRL's model arguments -> what becomes of it."""


def worth_telling(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a tool's default whose value is not what Luyen would use anyway."""
    return {key: value for key, value in keys.items() if defaults.get(key, ...) != value}
