"""Cases of rules about what a larger batch or a larger group presses on."""

_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_KL = (f"{_A}.use_kl_loss=true", f"{_REF}.log_prob_use_dynamic_bsz=false")
_OFFLOAD = ("trainer.device=cuda", f"{_MODEL}.enable_activation_offload=true")
_POOL = (f"{_A}.use_kl_loss=true", "trainer.runtime=ray", f"{_REF}.nnodes=1")

PRESSURE_CASES = {
    "B11": (
        ("algorithm.adv_estimator=grpo", f"{_R}.n=64"),
        ("algorithm.adv_estimator=grpo", f"{_R}.n=64", f"{_A}.ppo_max_token_len_per_gpu=40000"),
    ),
    "D20": (
        ("data.filter_overlong_prompts=false",),
        ("data.filter_overlong_prompts=true",),
    ),
    "K10": (
        (*_POOL, "trainer.n_gpus_per_node=5", f"{_REF}.n_gpus_per_node=1"),
        (*_POOL, "trainer.n_gpus_per_node=4", f"{_REF}.n_gpus_per_node=1"),
    ),
    "P03": (
        (*_OFFLOAD, f"{_MODEL}.enable_gradient_checkpointing=false"),
        (*_OFFLOAD, f"{_MODEL}.enable_gradient_checkpointing=true"),
    ),
    "K05": (
        (*_KL, f"{_REF}.log_prob_micro_batch_size_per_gpu=1"),
        (*_KL, f"{_REF}.log_prob_micro_batch_size_per_gpu=16"),
    ),
    "R20": (
        ("data.train_batch_size=512", f"{_R}.max_num_seqs=127"),
        ("data.train_batch_size=512", f"{_R}.max_num_seqs=128"),
    ),
}
