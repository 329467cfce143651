"""Cases of rules about what a larger batch or a larger group presses on."""

_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_KL = (f"{_A}.use_kl_loss=true", f"{_REF}.log_prob_use_dynamic_bsz=false")

PRESSURE_CASES = {
    "B11": (
        ("algorithm.adv_estimator=grpo", f"{_R}.n=64"),
        ("algorithm.adv_estimator=grpo", f"{_R}.n=64", f"{_A}.ppo_max_token_len_per_gpu=40000"),
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
