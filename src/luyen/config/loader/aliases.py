"""Keys of verl, TRL, LLaMA-Factory and Axolotl: what each is read as, or what to write.

What is written under such a name is read under ours, with a note that says so. Written under both
names it is an error.
"""

from dataclasses import replace
from typing import Any, cast

from luyen.config.fields import all_fields
from luyen.config.loader.tree import ConfigTree, leaves, merged, nested, origin_of, removed
from luyen.config.problem import Problem, Severity

# Keys of verl that Luyen does not have: the alternative, or why none is needed.
#
# `MOOT` keys are accepted at the values listed, since that is what Luyen always does, and
# refused at any other. `NEAREST` keys are refused with the nearest alternative; a block stands
# for all its keys.

_ARR = "actor_rollout_ref"
_ACTOR = f"{_ARR}.actor"
_ROLLOUT = f"{_ARR}.rollout"

_CRITIC_OFFLOAD = "the critic is offloaded where actor_rollout_ref.actor.fsdp_config offloads"

MOOT: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{_ARR}.hybrid_engine": (
        (True,),
        "rollouts share the devices of the actor unless actor_rollout_ref.rollout.nnodes gives "
        "them their own",
    ),
    f"{_ARR}.model.use_shm": ((False,), "weights are read where they are"),
    f"{_ARR}.model.external_lib": ((None,), "extensions are named under trainer.plugins"),
    f"{_ACTOR}.use_remove_padding": ((True,), "batches are always packed"),
    f"{_ACTOR}.entropy_from_logits_with_chunking": ((True,), "entropy is always chunked"),
    f"{_ACTOR}.use_gpg_loss": (
        (False,),
        "the loss is chosen by policy_loss.loss_mode, such as gpg",
    ),
    f"{_ACTOR}.pad_to_length": ((False,), "batches are always packed"),
    f"{_ACTOR}.optim.optimizer": (("AdamW",), "it is optim.name's default"),
    f"{_ACTOR}.optim.optimizer_impl": (("torch.optim",), "AdamW comes from torch.optim"),
    f"{_ACTOR}.optim.total_training_steps": ((-1,), "taken from trainer.total_training_steps"),
    f"{_ROLLOUT}.mode": (("async",), "rollouts are always coroutines over one engine"),
    f"{_ROLLOUT}.load_format": (("dummy", "auto"), "weights come from the trainer"),
    f"{_ROLLOUT}.enable_chunked_prefill": ((True,), "prefill is always chunked"),
    f"{_ROLLOUT}.do_sample": ((True,), "training always samples"),
    f"{_ROLLOUT}.skip_tokenizer_init": ((True, False), "engines take and give token ids"),
    f"{_ROLLOUT}.disable_log_stats": ((True, False), "engine figures are metrics of the run"),
    f"{_ROLLOUT}.layered_summon": ((False, True), "weights are published in buckets"),
    f"{_ROLLOUT}.multi_turn.use_inference_chat_template": (
        (True,),
        "training and inference share one template",
    ),
    f"{_ACTOR}.fsdp_config.grad_offload": ((False,), "gradients stay with the weights"),
    "critic.model.fsdp_config.grad_offload": ((False,), "gradients stay with the weights"),
    "critic.model.fsdp_config.param_offload": ((False,), _CRITIC_OFFLOAD),
    "critic.model.fsdp_config.optimizer_offload": ((False,), _CRITIC_OFFLOAD),
    "data.shuffle": ((True,), "data.sampler.name=shuffled is the default; sequential keeps order"),
    "critic.strategy": (("fsdp", "fsdp2"), "the critic uses the actor's training engine"),
    "data.dataloader_num_workers": ((0, 8), "rows are read by the controller"),
    "data.filter_overlong_prompts_workers": ((1,), "rows are filtered by the controller"),
    "data.validation_shuffle": ((False,), "validation rows keep their order"),
    "data.return_raw_input_ids": ((False,), "token ids are always kept"),
    "data.return_full_prompt": ((False,), "prompts are always kept"),
    "trainer.balance_batch": ((True,), "shards are always balanced by tokens"),
    "trainer.use_legacy_worker_impl": (
        ("auto", "disable"),
        "there is one implementation of every role",
    ),
    "trainer.use_v1": ((True,), "there is one trainer"),
    "trainer.val_only": ((False,), "evaluate a checkpoint with its own command"),
    "trainer.default_hdfs_dir": ((None,), "checkpoints go to the run directory"),
    "trainer.del_local_ckpt_after_load": ((False,), "checkpoints are never deleted by loading"),
}

_PACKED = "batches are packed; see actor_rollout_ref.actor.use_dynamic_bsz"
_PER_GPU = "the global form is ambiguous; use the key of the same name ending in _per_gpu"
_ENGINE = "the training engine is chosen by actor_rollout_ref.actor.strategy"
_SHARDS = (
    "every layer is a shard of its own; what can be set is "
    "actor_rollout_ref.actor.fsdp_config.{fsdp_size,reshard_after_forward,param_offload,"
    "optimizer_offload,tensor_parallel_size,expert_parallel_size,ulysses_sequence_parallel_size}"
)
_LORA = "LoRA is actor_rollout_ref.model.{lora_rank,lora_alpha,target_modules,lora_adapter_path}"
_TEXT_ONLY = "Luyen trains text models: drop the key"
_AS_ACTOR = "no effect: reference and critic divide sequences as the actor does"

NOTED: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{_ARR}.ref.fsdp_config.param_offload": (
        (True, False),
        "no effect: weights of the reference stay where the actor's are",
    ),
    f"{_ROLLOUT}.enable_chunked_prefill": ((False,), "no effect: prefill is always chunked"),
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": (
        (),
        "no effect: weights go to the replicas in buckets of a size of their own",
    ),
    f"{_ARR}.ref.ulysses_sequence_parallel_size": ((), _AS_ACTOR),
    "critic.ulysses_sequence_parallel_size": ((), _AS_ACTOR),
    "data.val_batch_size": ((), "no effect: all validation rows are generated together"),
}
"""Accepted with a note at these values, at any where none is listed: they choose how much memory a
step takes, and change no number."""

RENAMED: dict[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.rollout": "reward.reward_model.rollout",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    f"{_ACTOR}.ulysses_sequence_parallel_size": (
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    ),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": f"{_ACTOR}.fsdp_config.tensor_parallel_size",
    f"{_ACTOR}.megatron.expert_model_parallel_size": f"{_ACTOR}.fsdp_config.expert_parallel_size",
}
"""Keys and blocks that verl keeps at another place, and ours: read there, with a note."""

NEAREST: dict[str, str] = {
    "hydra": "includes are a `defaults` list of YAML files",
    "transfer_queue": "data moves in records between roles; nothing to set",
    "ray_kwargs": "trainer.runtime, trainer.nnodes and trainer.n_gpus_per_node",
    "skip": "recorded steps are replayed from the run directory",
    "global_profiler": "trainer.profile.{steps,memory,save_path}, or the command `luyen profile`",
    "distillation": "distill, with trainer.stage=distill or distill.on_policy=true",
    "sandbox_fusion": "reward.custom_reward_function.path",
    "reward_model": "reward.reward_model",
    "reward_model.launch_reward_fn_async": "nothing to set; drop the key",
    "model_engine": _ENGINE,
    "data.tokenizer": f"{_ARR}.model.tokenizer_path",
    "data.gen_batch_size": "data.train_batch_size; dynamic sampling is algorithm.filter_groups",
    "data.tool_config_path": f"{_ROLLOUT}.multi_turn.tool_config_path",
    "data.function_tool_path": f"{_ROLLOUT}.multi_turn.function_tool_path",
    "data.trust_remote_code": f"{_ARR}.model.trust_remote_code",
    "data.custom_cls": "data.sampler.class_path and trainer.plugins",
    "data.image_key": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "data.image_patch_size": _TEXT_ONLY,
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "data.mm_processor_kwargs": _TEXT_ONLY,
    "data.use_shm": "rows are read where they are; drop the key",
    f"{_ARR}.nccl_timeout": "nothing yet",
    f"{_ARR}.model.hf_config_path": f"{_ARR}.model.path and {_ARR}.model.override_config",
    f"{_ARR}.model.use_liger": f"{_ARR}.model.use_fused_kernels",
    f"{_ARR}.model.fused_kernel_options": f"{_ARR}.model.use_fused_kernels",
    f"{_ARR}.model.exclude_modules": f"{_ARR}.model.target_modules",
    f"{_ARR}.model.lora": _LORA,
    f"{_ARR}.model.mtp": "nothing yet",
    f"{_ACTOR}.ppo_micro_batch_size": _PER_GPU,
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.fsdp_config.model_dtype": f"{_ARR}.model.dtype",
    f"{_ACTOR}.fsdp_config.dtype": f"{_ARR}.model.dtype",
    f"{_ACTOR}.fsdp_config.offload_policy": (
        f"{_ACTOR}.fsdp_config.param_offload with {_ACTOR}.fsdp_config.optimizer_offload"
    ),
    f"{_ACTOR}.fsdp_config.full_determinism": "trainer.seed decides all chance; drop the key",
    f"{_ACTOR}.fsdp_config.seed": "trainer.seed",
    f"{_ACTOR}.fsdp_config": _SHARDS,
    f"{_ACTOR}.megatron": _ENGINE,
    f"{_ACTOR}.veomni": _ENGINE,
    f"{_ACTOR}.torchtitan": _ENGINE,
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.num_cycles": f"{_ACTOR}.optim.min_lr_ratio",
    f"{_ACTOR}.optim.override_optimizer_config": f"{_ACTOR}.optim.betas",
    f"{_ACTOR}.use_fused_kernels": f"{_ARR}.model.use_fused_kernels",
    f"{_ACTOR}.use_dynamic_batch_size": f"{_ACTOR}.use_dynamic_bsz",
    f"{_ACTOR}.calculate_entropy": "entropy is always measured; drop the key",
    f"{_ACTOR}.use_torch_compile": "layers are fused by Luyen's kernels; drop the key",
    f"{_ACTOR}.use_prefix_grouper": "prompts of a group are shared by plan; drop the key",
    f"{_ACTOR}.entropy_from_logits_chunk_size": "chunks are chosen by the engine; drop the key",
    f"{_ACTOR}.rollout_n": f"{_ROLLOUT}.n",
    f"{_ACTOR}.checkpoint": "trainer.save_freq; a checkpoint always holds everything",
    f"{_ACTOR}.router_replay.record_file": "experts are recorded with the rollouts; drop the key",
    f"{_ACTOR}.router_replay.replay_file": "experts are recorded with the rollouts; drop the key",
    f"{_ACTOR}.qat": "nothing yet",
    f"{_ROLLOUT}.log_prob_micro_batch_size": _PER_GPU,
    f"{_ROLLOUT}.micro_batch_size": f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.checkpoint_engine": "weights go to the replicas in buckets; drop the key",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.dtype": f"{_ARR}.model.dtype",
    f"{_ROLLOUT}.pipeline_model_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.over_sample_rate": "algorithm.filter_groups",
    f"{_ROLLOUT}.agent": f"{_ROLLOUT}.multi_turn",
    f"{_ROLLOUT}.multi_turn.num_repeat_rollouts": f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.trace": "every rollout is recorded in the run directory; drop the key",
    f"{_ROLLOUT}.prometheus": "metrics are files of the run directory; drop the key",
    f"{_ARR}.ref.log_prob_micro_batch_size": _PER_GPU,
    f"{_ARR}.ref.strategy": _ENGINE,
    f"{_ARR}.ref.fsdp_config.model_dtype": f"{_ARR}.model.dtype",
    f"{_ARR}.ref.fsdp_config.dtype": f"{_ARR}.model.dtype",
    f"{_ARR}.ref.fsdp_config": _SHARDS,
    f"{_ARR}.ref.megatron": _ENGINE,
    f"{_ARR}.ref.rollout_n": f"{_ROLLOUT}.n",
    f"{_ARR}.ref.model": f"{_ARR}.ref.path",
    "critic.ppo_micro_batch_size": _PER_GPU,
    "critic.forward_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.megatron": _ENGINE,
    "critic.rollout_n": f"{_ROLLOUT}.n",
    "critic.checkpoint": "trainer.save_freq; a checkpoint always holds everything",
    "critic.model.fsdp_config": _SHARDS,
    "reward.sandbox_fusion": "reward.custom_reward_function.path",
    "reward.reward_manager.source": "reward.reward_manager.name, with trainer.plugins",
    "reward.reward_manager.module": "trainer.plugins",
    "reward.reward_kwargs": (
        "reward.overlong_buffer, or reward.custom_reward_function.reward_kwargs"
    ),
    "algorithm.use_pf_ppo": "algorithm.filter_groups",
    "algorithm.pf_ppo": "algorithm.filter_groups",
    "algorithm.filter_groups.max_inflight_gen_batches": (
        "algorithm.filter_groups.max_num_gen_batches"
    ),
    "algorithm.rollout_correction.rollout_is_level": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "algorithm.rollout_correction.rollout_rs_threshold, as `lo_hi`"
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "algorithm.rollout_correction.rollout_rs=seq_max_k3"
    ),
    "algorithm.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "trainer.rollout_data_dir": "rollouts are always kept in the run directory; drop the key",
    "trainer.validation_data_dir": "validation rollouts are always kept; drop the key",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep; a checkpoint holds both",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep; a checkpoint holds both",
    "trainer.v1": "trainer.max_staleness",
    "trainer.esi_redundant_time": "nothing yet",
    "trainer.ray_wait_register_center_timeout": "nothing to wait for; drop the key",
}

CHANGED_VALUES: dict[str, dict[Any, Any]] = {
    "trainer.resume_mode": {"resume_path": "path"},
    f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode": {"disable": "off"},
    f"{_ROLLOUT}.multi_turn.format": {"gpt-oss": "gpt_oss", "qwen3-coder": "qwen3_coder"},
}
"""verl's word for a value, and ours: named in the message when the value is refused."""


def is_verl(path: str) -> bool:
    """Whether it is a key or a block that verl has and Luyen has not."""
    return path in MOOT or path in NOTED or nearest(path) is not None


def is_noted(path: str, value: Any) -> bool:
    """Whether a key of verl is accepted at a value, with a note that it has no effect."""
    accepted = NOTED[path][0] if path in NOTED else None
    return accepted is not None and (not accepted or value in accepted)


def nearest(path: str) -> str | None:
    """What to use instead of a verl key: that of the key itself or of a block around it."""
    while path:
        if path in NEAREST:
            return NEAREST[path]
        path = path.rpartition(".")[0]
    return None


_ESTIMATOR, _LOSS = "algorithm.adv_estimator", "preference.loss_type"
STAGES: dict[str, dict[str, Any]] = {
    "ppo": {"trainer.stage": "rl", _ESTIMATOR: "gae"},
    "grpo": {"trainer.stage": "rl", _ESTIMATOR: "grpo"},
    "rloo": {"trainer.stage": "rl", _ESTIMATOR: "rloo"},
    "dpo": {"trainer.stage": "preference", _LOSS: "sigmoid"},
    "kto": {"trainer.stage": "preference", _LOSS: "kto"},
    "orpo": {"trainer.stage": "preference", _LOSS: "orpo"},
    "simpo": {"trainer.stage": "preference", _LOSS: "simpo"},
    "rm": {"trainer.stage": "reward_model"},
    "pt": {"trainer.stage": "sft"},
    "reward": {"trainer.stage": "reward_model"},
    "gkd": {"trainer.stage": "distill"},
}
"""Word of another project for `trainer.stage` -> keys that mean it."""
LOSSES = {"dpo": "sigmoid"}
"""Word for `preference.loss_type` -> the loss."""


def with_our_names(tree: ConfigTree) -> ConfigTree:
    """The tree under our names, with a note for each other name."""
    tree = _renamed(tree)
    words = dict(leaves(tree.values))
    stage = words.get("trainer.stage")
    if isinstance(stage, str) and stage in STAGES:
        tree = _read_as(tree, "trainer.stage", stage, STAGES[stage])
    loss = words.get(_LOSS)
    if isinstance(loss, str) and loss in LOSSES:
        tree = _read_as(tree, _LOSS, loss, {_LOSS: LOSSES[loss]})
    listed = cast(list[Any], loss) if isinstance(loss, list) else []
    if any(one in LOSSES for one in listed if isinstance(one, str)):
        ours = [LOSSES.get(str(one), one) for one in listed]
        tree = _read_as(tree, _LOSS, loss, {_LOSS: ours})
    return tree


def _read_as(tree: ConfigTree, path: str, word: Any, keys: dict[str, Any]) -> ConfigTree:
    """The tree with these keys for a word; another word written at one of them is an error."""
    origin, said = origin_of(path, tree.origins), ", ".join(f"{k}={v}" for k, v in keys.items())
    problems = [_problem("note", path, word, f"read as {said}", f"write {said}", tree)]
    written = dict(leaves(tree.values))
    values = tree.values
    for key, value in keys.items():
        other = written.get(key)
        if key != path and other is not None and LOSSES.get(str(other), other) != value:
            why, fix = f"`{path}: {word}` means {key}={value}", f"drop one of the two: {said}"
            problems.append(_problem("error", key, other, why, fix, tree))
        values = merged(values, nested(key.split("."), value))
    origins = {**dict.fromkeys(keys, origin), **tree.origins}
    return replace(tree, values=values, origins=origins, problems=(*tree.problems, *problems))


def _renamed(tree: ConfigTree) -> ConfigTree:
    for old, value in leaves(tree.values):
        new = our_name(old)
        if new is None or old in all_fields():
            continue
        origin = origin_of(old, tree.origins)
        written = dict(leaves(tree.values))
        values = removed(tree.values, old.split("."))
        severity: Severity = "note"
        why, fix = f"another name for {new}, and read as it", f"write {new}"
        if new in written and written[new] != value:
            severity, why = "error", f"another name for {new}, which is written too"
            fix = "keep one of the two"
        elif value is None and new not in written:
            severity, why, fix = "note", f"another name for {new}, and empty", "drop the line"
        else:
            values = merged(values, nested(new.split("."), value))
        origins = {path: at for path, at in tree.origins.items() if path != old} | {new: origin}
        said = _problem(severity, old, value, why, fix, replace(tree, origins={old: origin}))
        tree = replace(
            tree, values=_pruned(values, old), origins=origins, problems=(*tree.problems, said)
        )
    return tree


def our_name(path: str) -> str | None:
    """Our name for a key, or for one below a block that has another name here."""
    block, rest = path, ""
    while block:
        if block in RENAMED:
            return f"{RENAMED[block]}{rest}"
        block, _, name = block.rpartition(".")
        rest = f".{name}{rest}"
    return None


def _pruned(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The values without the blocks around `path` that hold nothing any more."""
    names = path.split(".")[:-1]
    while names:
        inner: Any = values
        for name in names:
            inner = inner[name]
        if inner:
            break
        values = removed(values, names)
        names = names[:-1]
    return values


def _problem(
    severity: Severity, path: str, value: Any, why: str, fix: str, tree: ConfigTree
) -> Problem:
    origin = origin_of(path, tree.origins)
    return Problem(
        id="C016", severity=severity, field=path, value=value, why=why, fix=fix, origin=origin
    )


# Keys of TRL, LLaMA-Factory and Axolotl, and the key to write instead.
#
# They are refused and not mapped: there they are flat, and several mean one thing or another by
# the trainer that reads them. The error gives the exact key.

_OPTIM = f"{_ARR}.actor.optim"
_MODEL = f"{_ARR}.model"
_BATCH = "data.train_batch_size (prompts of a step over all devices; micro-batches fill by tokens)"
_KL = f"{_ARR}.actor.kl_loss_coef with {_ARR}.actor.use_kl_loss=true (rl), preference.beta (DPO)"
_ROWS = "data.train_files; `luyen data inspect FILE` says how its rows are read"
_ALWAYS = "nothing: it is always so; drop the line"

FOREIGN: dict[str, str] = {
    "model_name_or_path": f"{_MODEL}.path",
    "base_model": f"{_MODEL}.path",
    "adapter_name_or_path": f"{_MODEL}.lora_adapter_path",
    "ref_model": f"{_ARR}.ref.path",
    "reward_model_path": "reward.reward_model.model_path",
    "trust_remote_code": f"{_MODEL}.trust_remote_code",
    "torch_dtype": f"{_MODEL}.dtype",
    "bf16": f"{_MODEL}.dtype=bfloat16",
    "fp16": f"{_MODEL}.dtype",
    "gradient_checkpointing": f"{_MODEL}.enable_gradient_checkpointing",
    "use_liger_kernel": f"{_MODEL}.use_fused_kernels",
    "lora_r": f"{_MODEL}.lora_rank",
    "lora_rank": f"{_MODEL}.lora_rank",
    "lora_alpha": f"{_MODEL}.lora_alpha",
    "lora_target": f"{_MODEL}.target_modules",
    "lora_target_modules": f"{_MODEL}.target_modules",
    "finetuning_type": f"{_MODEL}.lora_rank above 0 for an adapter, else all weights are trained",
    "use_peft": f"{_MODEL}.lora_rank above 0",
    "adapter": f"{_MODEL}.lora_rank above 0",
    "learning_rate": f"{_OPTIM}.lr",
    "lr": f"{_OPTIM}.lr",
    "lr_scheduler_type": f"{_OPTIM}.lr_scheduler_type",
    "lr_scheduler": f"{_OPTIM}.lr_scheduler_type",
    "warmup_ratio": f"{_OPTIM}.lr_warmup_steps_ratio",
    "warmup_steps": f"{_OPTIM}.lr_warmup_steps",
    "weight_decay": f"{_OPTIM}.weight_decay",
    "max_grad_norm": f"{_OPTIM}.clip_grad",
    "adam_beta1": f"{_OPTIM}.betas",
    "adam_beta2": f"{_OPTIM}.betas",
    "num_train_epochs": "trainer.total_epochs",
    "num_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "per_device_train_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "generation_batch_size": _BATCH,
    "steps_per_generation": f"{_ARR}.actor.ppo_mini_batch_size",
    "num_iterations": f"{_ARR}.actor.ppo_epochs",
    "num_ppo_epochs": f"{_ARR}.actor.ppo_epochs",
    "per_device_eval_batch_size": "nothing: validation runs in one pass; drop the line",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "eval_steps": "trainer.test_freq",
    "eval_strategy": "trainer.test_freq",
    "save_strategy": "trainer.save_freq",
    "logging_steps": "nothing: every step is logged; drop the line",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "output_dir": "trainer.default_local_dir",
    "resume_from_checkpoint": "trainer.resume_mode, trainer.resume_from_path",
    "seed": "trainer.seed",
    "dataset": _ROWS,
    "datasets": _ROWS,
    "dataset_name": _ROWS,
    "dataset_dir": _ROWS,
    "val_size": "data.val_files",
    "max_samples": "data.train_max_samples",
    "template": "nothing: the model's own chat template is used; drop the line",
    "chat_template": "nothing: the model's own chat template is used; drop the line",
    "packing": _ALWAYS,
    "sample_packing": _ALWAYS,
    "cutoff_len": "data.max_prompt_length and data.max_response_length",
    "max_length": "data.max_prompt_length and data.max_response_length",
    "max_seq_length": "data.max_prompt_length and data.max_response_length",
    "sequence_len": "data.max_prompt_length and data.max_response_length",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "response_length": "data.max_response_length",
    "num_generations": f"{_ROLLOUT}.n",
    "temperature": f"{_ROLLOUT}.temperature",
    "top_p": f"{_ROLLOUT}.top_p",
    "top_k": f"{_ROLLOUT}.top_k",
    "use_vllm": f"{_ROLLOUT}.name",
    "vllm_mode": f"{_ROLLOUT}.name",
    "vllm_gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "beta": _KL,
    "kl_coef": _KL,
    "pref_beta": "preference.beta",
    "pref_loss": "preference.loss_type",
    "rl": "trainer.stage",
    "stage": "trainer.stage",
    "epsilon": f"{_ARR}.actor.clip_ratio",
    "epsilon_high": f"{_ARR}.actor.clip_ratio_high",
    "cliprange": f"{_ARR}.actor.clip_ratio",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "loss_type": f"preference.loss_type, or {_ARR}.actor.policy_loss.loss_mode (rl)",
    "importance_sampling_level": f"{_ARR}.actor.policy_loss.loss_mode=gspo for `sequence`",
    "mask_truncated_completions": "reward.overlong_buffer",
    "reward_funcs": "reward.custom_reward_function.path, or reward.components",
    "reward_weights": "`weight` of each of reward.components",
    "assistant_only_loss": "sft.learn",
    "train_on_inputs": "sft.learn",
    "completion_only_loss": "sft.learn=completion",
    "deepspeed": f"{_ARR}.actor.strategy",
    "fsdp": f"{_ARR}.actor.strategy and {_ARR}.actor.fsdp_config",
}
"""Name -> what to write."""
