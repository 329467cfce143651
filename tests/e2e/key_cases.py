"""What a value other than the default does, for every key that users of verl know.

Key -> (kind, value, what both runs have besides). The kinds are `plan` (`luyen check` plans another
run), `run` (metrics or weights differ), `refused` (`luyen check` says why not), `stopped` (the run
says so before its first step) and `warned` (`luyen check` says that it has no effect here).
"""

from typing import TypeAlias

from tests.runs import ACTOR, CHATTY, MODEL, ROLLOUT, TURNS

Case: TypeAlias = tuple[str, str, tuple[str, ...]]

NOWHERE = "./nowhere"
OFF = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.optim.lr=0.01")
"""Two optimizer steps: the second one meets ratios away from 1, and a KL away from 0."""
THREE = ("trainer.total_training_steps=3",)
LORA = (f"{MODEL}.lora_rank=4",)
COUNTED = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
KL_LOSS = (*OFF, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5")
KL_REWARD = (
    *OFF,
    "trainer.total_training_steps=2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.5",
)
ADAPTIVE = (*KL_REWARD, *THREE, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")
CRITIC = ("algorithm.adv_estimator=gae", f"{ROLLOUT}.n=1", *OFF, "critic.optim.lr=0.01")
LONG = (
    "data.train_files=arithmetic://sum?digits=2&size=64",
    "data.max_prompt_length=24",
)
CUT = (*LONG, "data.filter_overlong_prompts=false", "data.truncation=right")
ROWS = ("data.train_files={rows}",)
ROUTED = (*ROWS, "reward.custom_reward_function.path=null")
TREE = (
    "reward.custom_reward_function.path=null",
    "reward.components={right: {rule: exact}, brief: {rule: length, weight: 0.1}}",
)
CUT_RESULTS = (*CHATTY, f"{TURNS}.max_tool_response_length=2")
TOKEN = (*OFF, "algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.temperature=0.7")
BYPASS = (*OFF, "algorithm.rollout_correction.bypass_mode=true")
REJECT = (*OFF, "algorithm.rollout_correction.rollout_rs=token_k1")
VALIDATED = (*THREE, "data.val_files=arithmetic://sum?digits=1&split=held-out")
VAL = f"{ROLLOUT}.val_kwargs"
LETTERS = "[a, b, c, d, e, f, g, h, i, j, k, l]"
HELD_OUT = ("data.val_files=arithmetic://sum?digits=2&split=held-out&size=8",)
SAMPLED = (f"{VAL}.do_sample=true", f"{VAL}.temperature=1")

DATA: dict[str, Case] = {
    "data.train_files": ("run", "arithmetic://difference?digits=1&size=32", ()),
    "data.val_files": ("run", "arithmetic://sum?digits=1&split=held-out", ()),
    "data.prompt_key": ("run", "question", ROWS),
    "data.reward_fn_key": ("stopped", "kind", ROUTED),
    "data.max_prompt_length": ("plan", "40", ()),
    "data.max_response_length": ("plan", "8", ()),
    "data.train_batch_size": ("plan", "8", ()),
    "data.return_raw_chat": ("refused", "false", ()),
    "data.filter_overlong_prompts": ("stopped", "false", LONG),
    "data.truncation": ("run", "left", CUT),
    "data.sampler.name": ("run", "sequential", ()),
    "data.sampler.class_path": ("refused", NOWHERE, ("data.sampler.class_name=Mine",)),
    "data.sampler.class_name": ("refused", "Nobody", ("data.sampler.class_path={sampler}",)),
    "data.sampler.kwargs": ("refused", "{pace: 2}", ()),
}
MODELS: dict[str, Case] = {
    f"{MODEL}.path": ("refused", NOWHERE, ()),
    f"{MODEL}.tokenizer_path": ("refused", NOWHERE, ()),
    f"{MODEL}.override_config": ("run", "{num_hidden_layers: 2}", ()),
    f"{MODEL}.enable_gradient_checkpointing": ("plan", "true", ()),
    f"{MODEL}.enable_activation_offload": ("warned", "true", ()),
    f"{ACTOR}.fsdp_config.fsdp_size": ("warned", "2", ()),
    f"{ACTOR}.fsdp_config.reshard_after_forward": ("warned", "false", ()),
    f"{ACTOR}.fsdp_config.param_offload": ("warned", "true", ()),
    f"{ACTOR}.fsdp_config.optimizer_offload": ("warned", "true", ()),
    f"{ACTOR}.fsdp_config.tensor_parallel_size": ("refused", "2", ()),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ("refused", "2", ()),
    f"{MODEL}.use_remove_padding": ("refused", "false", ()),
    f"{MODEL}.use_fused_kernels": ("run", "true", ()),
    f"{MODEL}.tiled_mlp.enabled": ("plan", "true", ()),
    f"{MODEL}.tiled_mlp.num_shards": ("plan", "1", (f"{MODEL}.tiled_mlp.enabled=true",)),
    f"{MODEL}.lora_rank": ("plan", "4", ()),
    f"{MODEL}.lora_alpha": ("run", "32", LORA),
    f"{MODEL}.target_modules": ("run", "[q_proj]", LORA),
    f"{MODEL}.lora_adapter_path": ("refused", NOWHERE, LORA),
}
ACTORS: dict[str, Case] = {
    f"{ACTOR}.ppo_mini_batch_size": ("plan", "2", ()),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": ("plan", "2", COUNTED),
    f"{ACTOR}.use_dynamic_bsz": ("plan", "false", COUNTED[1:]),
    f"{ACTOR}.ppo_max_token_len_per_gpu": ("plan", "64", ()),
    f"{ACTOR}.policy_loss.loss_mode": ("run", "gspo", OFF),
    f"{ACTOR}.clip_ratio": ("run", "1.0e-4", OFF),
    f"{ACTOR}.clip_ratio_low": ("run", "1.0e-4", OFF),
    f"{ACTOR}.clip_ratio_high": ("run", "1.0e-4", OFF),
    f"{ACTOR}.clip_ratio_c": ("run", "1.0001", OFF),
    f"{ACTOR}.loss_agg_mode": ("run", "seq-mean-token-sum", ()),
    f"{ACTOR}.entropy_coeff": ("run", "0.1", ()),
    f"{ACTOR}.use_kl_loss": ("plan", "true", ()),
    f"{ACTOR}.kl_loss_coef": ("run", "0.1", KL_LOSS),
    f"{ACTOR}.kl_loss_type": ("run", "abs", KL_LOSS),
    f"{ACTOR}.optim.lr": ("run", "1.0e-4", ()),
    f"{ACTOR}.optim.lr_warmup_steps": ("run", "2", THREE),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": ("run", "0.9", THREE),
    f"{ACTOR}.optim.weight_decay": ("run", "0.5", ()),
    f"{ACTOR}.ppo_epochs": ("plan", "2", ()),
    f"{ACTOR}.router_aux_loss_coef": ("refused", "0.1", ()),
    f"{ACTOR}.router_replay.mode": ("refused", "R3", ()),
    f"{ACTOR}.shuffle": ("run", "true", OFF),
}
ROLLOUTS: dict[str, Case] = {
    f"{ROLLOUT}.name": ("plan", "hf", ()),
    f"{ROLLOUT}.gpu_memory_utilization": ("warned", "0.2", ()),
    f"{ROLLOUT}.min_p": ("run", "0.9", ()),
    f"{ROLLOUT}.min_new_tokens": ("run", "6", ()),
    f"{ROLLOUT}.stop": ("run", LETTERS, ()),
    f"{ROLLOUT}.stop_token_ids": ("run", "[20, 21, 22, 23, 24, 25, 26, 27, 28, 29]", ()),
    f"{VAL}.min_p": ("run", "0.9", (*HELD_OUT, *SAMPLED)),
    f"{VAL}.max_new_tokens": ("run", "2", HELD_OUT),
    f"{VAL}.min_new_tokens": ("run", "6", (*HELD_OUT, f"{ROLLOUT}.stop={LETTERS}")),
    f"{VAL}.stop": ("run", LETTERS, HELD_OUT),
    f"{VAL}.stop_token_ids": ("run", "[20, 21, 22, 23, 24, 25, 26, 27, 28, 29]", HELD_OUT),
    f"{ROLLOUT}.tensor_model_parallel_size": ("refused", "2", ()),
    f"{ROLLOUT}.data_parallel_size": ("refused", "2", ()),
    f"{ROLLOUT}.nnodes": ("plan", "1", ()),
    f"{ROLLOUT}.n_gpus_per_node": ("plan", "2", (f"{ROLLOUT}.nnodes=1",)),
    f"{ROLLOUT}.expert_parallel_size": ("warned", "2", ()),
    f"{ROLLOUT}.enable_rollout_routing_replay": ("refused", "true", ()),
    f"{ROLLOUT}.deterministic": ("warned", "false", ()),
    f"{ROLLOUT}.enforce_eager": ("warned", "true", ()),
    f"{ROLLOUT}.cuda_ipc": ("warned", "true", ()),
    f"{ROLLOUT}.free_cache_engine": ("plan", "true", ()),
    f"{ROLLOUT}.enable_prefix_caching": ("warned", "false", (f"{ROLLOUT}.name=hf",)),
    f"{ROLLOUT}.max_num_batched_tokens": ("refused", "2", ()),
    f"{ROLLOUT}.max_model_len": ("refused", "10", ()),
    f"{ROLLOUT}.max_num_seqs": ("plan", "4", ()),
    f"{ROLLOUT}.n": ("plan", "8", ()),
    f"{ROLLOUT}.calculate_log_probs": ("refused", "false", ()),
    f"{TURNS}.enable": ("run", "false", CHATTY),
    f"{TURNS}.tool_config_path": ("refused", NOWHERE, CHATTY),
    f"{TURNS}.function_tool_path": ("run", "null", CHATTY),
    f"{TURNS}.format": ("run", "hermes", CHATTY),
    f"{TURNS}.max_assistant_turns": ("run", "2", CHATTY),
    f"{TURNS}.max_user_turns": ("run", "1", CHATTY),
    f"{TURNS}.max_tool_calls": ("run", "1", CHATTY),
    f"{TURNS}.max_parallel_calls": ("run", "2", CHATTY),
    f"{TURNS}.max_tool_response_length": ("run", "2", CHATTY),
    f"{TURNS}.tool_response_truncate_side": ("run", "left", CUT_RESULTS),
    f"{TURNS}.tokenization_sanity_check_mode": ("run", "off", CHATTY),
    f"{TURNS}.on_parse_failure": ("run", "stop", CHATTY),
}
JUDGE = (
    "reward.custom_reward_function.path=null",
    "reward.reward_model={enable: true, model_path: 'builtin://arithmetic'}",
)
CREDIT: dict[str, Case] = {
    "critic.enable": ("refused", "true", ()),
    "critic.model.path": ("refused", NOWHERE, CRITIC),
    "critic.ppo_mini_batch_size": ("run", "4", CRITIC),
    "critic.cliprange_value": ("run", "1.0e-4", CRITIC),
    "critic.loss_agg_mode": ("run", "seq-mean-token-sum", CRITIC),
    "reward.custom_reward_function.path": ("run", "{reward}", ()),
    "reward.custom_reward_function.name": ("refused", "nobody", ()),
    "reward.combine": ("run", "gdpo", TREE),
    "reward.reward_model.enable": ("refused", "true", ()),
    "reward.reward_model.enable_resource_pool": ("refused", "true", ()),
    "reward.reward_model.rollout.max_model_len": ("refused", "8", JUDGE),
    "algorithm.adv_estimator": ("run", "rloo", ()),
    "algorithm.gamma": ("run", "0.5", CRITIC),
    "algorithm.lam": ("run", "0.5", (*CRITIC, "trainer.total_training_steps=2")),
    "algorithm.use_kl_in_reward": ("plan", "true", ()),
    "algorithm.kl_penalty": ("run", "abs", KL_REWARD),
    "algorithm.kl_ctrl.type": ("run", "adaptive", (*KL_REWARD, *THREE)),
    "algorithm.kl_ctrl.kl_coef": ("run", "0.1", KL_REWARD),
    "algorithm.kl_ctrl.horizon": ("run", "50", ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": ("run", "100.0", ADAPTIVE),
    "algorithm.rollout_correction.rollout_is": ("run", "token", OFF),
    "algorithm.rollout_correction.rollout_is_threshold": ("run", "0.5", TOKEN),
    "algorithm.rollout_correction.rollout_is_floor": ("run", "1.5", TOKEN),
    "algorithm.rollout_correction.rollout_is_batch_normalize": ("run", "true", TOKEN[:-1]),
    "algorithm.rollout_correction.rollout_rs": ("refused", "nothing", OFF),
    "algorithm.rollout_correction.rollout_rs_threshold": ("refused", "wide", REJECT),
    "algorithm.rollout_correction.bypass_mode": ("run", "true", OFF),
    "algorithm.rollout_correction.loss_type": ("run", "reinforce", BYPASS),
}
TRAINER: dict[str, Case] = {
    "trainer.nnodes": ("plan", "2", ()),
    "trainer.n_gpus_per_node": ("plan", "2", ()),
    "trainer.total_epochs": ("run", "2", ("trainer.total_training_steps=null", "{few}")),
    "trainer.total_training_steps": ("run", "2", ()),
    "trainer.test_freq": ("run", "1", VALIDATED),
    "trainer.val_before_train": ("run", "false", VALIDATED),
    "trainer.resume_mode": ("refused", "path", ()),
    "trainer.resume_from_path": ("refused", NOWHERE, ()),
    "trainer.logger": ("refused", "paper", ()),
    "trainer.log_val_generations": ("refused", "-1", ()),
    "trainer.log_train_generations": ("refused", "-1", ()),
    "trainer.watchdog.budgets": ("refused", "{genrate: 60}", ()),
    **{
        f"trainer.timeouts.{name}_s": ("warned", "7", ())
        for name in ("devices", "start", "silence", "progress", "collective")
    },
    "trainer.profile.steps": ("refused", "[0]", ()),
    "trainer.profile.memory": ("warned", "true", ("trainer.profile.steps=[1]",)),
    "trainer.profile.save_path": ("warned", "traces", ()),
    "trainer.use_legacy_worker_impl": ("refused", "enable", ()),  # of verl alone
}
CASES: dict[str, Case] = {**DATA, **MODELS, **ACTORS, **ROLLOUTS, **CREDIT, **TRAINER}
