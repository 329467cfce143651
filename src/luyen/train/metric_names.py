"""Declarations of every metric that the loops write.

`algorithms` and `engine` return metrics without depending on telemetry, so they are declared here.
"""

from luyen.telemetry.metrics import metric

_ACTOR = {
    "pg_loss": "Policy loss under the aggregation's weights.",
    "ppo_kl": "Mean of old minus current log-probability: how far the policy moved in the update.",
    "pg_clipfrac": "Share of tokens whose loss is clipped.",
    "pg_clipfrac_lower": "Share of tokens held by the dual clip.",
    "cispo_clipfrac": "Share of tokens whose ratio is clipped (cispo).",
    "clip_cov_selected_fraction": "Share of tokens set aside (clip_cov).",
    "kl_cov_selected_fraction": "Share of tokens with a KL penalty (kl_cov).",
    "dppo_masked_fraction": "Share of tokens outside the trust region (dppo).",
    "dppo_truncated_fraction": "Share of tokens whose ratio is capped (dppo).",
    "dro_penalty": "Mean quadratic term (dro).",
    "vespo_phi_mean": "Mean reshaping weight (vespo).",
    "entropy": "Mean entropy of the policy, in nats a token.",
    "kl_loss": "Mean KL penalty of the loss.",
    "ref_kl": "Mean KL to the reference before the update.",
    "ref_kl_slope": "Change of that KL per step, over the latest steps.",
    "reward_kl_coef": "Coefficient of the KL term in the reward.",
}
_CRITIC = {
    "vf_loss": "Value loss under the aggregation's weights.",
    "vf_clipfrac": "Share of tokens whose value loss is clipped.",
    "vpred_mean": "Mean value.",
    "explained_variance": "Share of the variance of the returns that the values before the update "
    "explain; below 0 the mean return predicts better.",
}
_UPDATE = {
    "grad_norm": "Norm of the gradient before clipping, mean over the optimizer steps.",
    "lr": "Learning rate.",
    "skipped_updates": "Optimizer steps left out because the gradient was not finite.",
}
_GROUP = {
    "variance": "Mean variance of the reward inside a group.",
    "zero_std_fraction": "Share of groups whose samples all score the same.",
    "solve_all_fraction": "Share of groups whose samples all reach reward 1.",
    "solve_none_fraction": "Share of groups without a sample that reaches reward 1.",
    "baseline_bias": "Mean of a sample's baseline minus the mean reward of its siblings.",
    "baseline_bias_abs": "The same, of absolute values.",
    "generated_batches": "Batches of prompts that were generated for the step.",
    "kept_fraction": "Share of the generated groups that were trained on.",
}
_PARITY = {
    "max_gap": "Largest difference between the trainer's log-probability and the sampler's.",
    "mean_gap": "Mean of that difference.",
    "exact_fraction": "Share of tokens without any difference.",
}
_PART = {
    "engine": "the same weights in other code",
    "staleness": "weights that have changed since the token was sampled",
    "drift": "conversations that differ from a re-rendering",
    "transform": "probability that top-k, top-p and min-p took away",
}
_PART_SIZE = {
    "max": "Largest part of a token's gap that comes from {}.",
    "mean": "Mean of that part: {}.",
    "exact_fraction": "Share of its tokens without any: {}.",
    "kl": "Estimate of KL(sampler, trainer) from that part: {}.",
    "share": "Its share in the sizes of all parts: {}.",
}
_LENGTH = {
    "mean": "Mean number of tokens.",
    "max": "Largest number of tokens.",
    "min": "Smallest number of tokens.",
    "cut_fraction": "Share of rollouts that ended at their token budget.",
}
_REWARD = {
    "mean": "Mean reward.",
    "std": "Spread of the reward over all rollouts.",
    "min": "Smallest reward.",
    "max": "Largest reward.",
    "faults": "Rollouts that could not be scored.",
}
_VALIDATION = {
    "accuracy": "Share of samples that reach reward 1; the mean reward where all are 0 or 1.",
    "accuracy_low": "Lower end of its 95 % interval.",
    "accuracy_high": "Upper end of its 95 % interval.",
    "pass@<k>": "Chance that k samples of a prompt hold one that reaches reward 1.",
    "reward/mean@<n>": "Mean reward over n samples of each prompt.",
}
_SFT = {
    "nll": "Mean negative log-likelihood of the assistant's tokens.",
    "val_nll": "The same on the validation rows.",
    "tokens": "Assistant tokens of the step.",
    "accuracy": "Share of the assistant's tokens that no other token is likelier than.",
    "val_accuracy": "The same on the validation rows.",
}
_PREFERENCE = {
    "loss": "Loss, mean over pairs or answers.",
    "accuracy": "Share of pairs whose chosen answer has the higher implicit reward, or of marked "
    "answers on their side of the threshold; a tie counts half.",
    "margin": "Implicit reward of chosen answers minus that of rejected ones.",
    "chosen_reward": "Implicit reward of chosen or good answers.",
    "rejected_reward": "Implicit reward of rejected or bad answers.",
    "chosen_logp": "Log-probability of chosen or good answers.",
    "rejected_logp": "Log-probability of rejected or bad answers.",
    "kl": "Estimate of the KL to the reference from mismatched answers (kto).",
    "reward_shift": "Mean implicit reward of all answers so far (bco).",
    "<name>_loss": "Loss of one part of a mixture.",
}
_REWARD_MODEL = {
    "loss": "Loss of the reward model, mean over pairs, answers or steps.",
    "accuracy": "Share of pairs whose chosen answer has the higher score, or of steps that are "
    "classified correctly; a tie counts half.",
    "margin": "Score of chosen answers minus that of rejected ones.",
    "chosen_score": "Mean score of chosen answers.",
    "rejected_score": "Mean score of rejected answers.",
    "absolute_error": "Mean distance of scores from the numbers of the rows (regression).",
    "bias": "Mean of scores minus the numbers of the rows (regression).",
    "step_score": "Mean probability that a step is right (process).",
    "calibration_error": "How far it is from being right as often as it is sure, over 15 bins.",
}
_DISTILL = {
    "divergence": "Mean divergence from the teacher over the tokens that are learned.",
    "nll": "Mean negative log-likelihood of the given answers under the student.",
}
_ROUTER = {
    "max_load": "Mixtures: tokens of the fullest expert by the mean of its layer, in the layer "
    "where that is largest; 1 is even.",
    "load_entropy": "Mixtures: entropy of the load of a layer by its largest value, mean over "
    "layers; 1 is even.",
    "idle_experts": "Mixtures: share of the experts that no token of an optimizer step chose.",
    "changed_routes": "Mixtures: share of tokens and layers for which the trainer's routers choose "
    "another set of experts than the sampler's did, where these are recorded.",
    "aux_loss": "Mixtures: load-balance loss before its weight, where it has one.",
}
_ROLE = {
    "memory_gb": ("GiB", "Most main memory of a process of the role since it began."),
    "device_gb": ("GiB", "Most memory of a GPU that such a process held since it began."),
    "busy": (
        "",
        "Share of the time since the step before in which the role worked, mean over its "
        "processes; in one process, its share of the phases.",
    ),
}
_WAIT = {
    "controller_on_actor": "Seconds for which the loop did nothing but wait for ranks.",
    "controller_on_reference": "Seconds for which the loop only waited for the reference, where it "
    "has devices of its own.",
    "controller_on_critic": "Seconds for which the loop only waited for the critic, where it has "
    "devices of its own.",
    "controller_on_rollout": "Seconds for which the loop did nothing but wait for replicas.",
    "controller_on_reward_model": "Seconds for which scoring only waited for reward models.",
    "reward_model_idle": "Seconds since the step before in which a copy of the reward model did "
    "nothing, mean over them.",
    "actor_idle": "Seconds since the step before in which a rank did nothing, mean over them.",
    "reference_idle": "Seconds since the step before in which a rank of the reference did nothing, "
    "mean over them.",
    "critic_idle": "Seconds since the step before in which a rank of the critic did nothing, mean "
    "over them.",
    "rollout_idle": "Seconds since the step before in which a replica did nothing, mean over them.",
}
_ASYNC = {
    "staleness_mean": "Mean number of versions by which the weights of a rollout are behind.",
    "staleness_max": "The largest such number in the step.",
    "mixed_fraction": "Share of rollouts that were generated by several versions of the weights.",
}
_FAMILIES = {
    "async": _ASYNC,
    "actor": {**_ACTOR, **_UPDATE},
    "critic": {**_CRITIC, **_UPDATE},
    "group": _GROUP,
    "parity": _PARITY,
    "response_length": _LENGTH,
    "prompt_length": {"mean": _LENGTH["mean"]},
    "reward": _REWARD,
    "router": _ROUTER,
    "val": _VALIDATION,
    "val/<source...>": _VALIDATION,
    "sft": _SFT,
    "preference": _PREFERENCE,
    "reward_model": _REWARD_MODEL,
}

for _family, _names in _FAMILIES.items():
    for _name, _doc in _names.items():
        metric(f"{_family}/{_name}", doc=_doc)

for _name, _doc in _PREFERENCE.items():
    metric(f"preference/val_{_name}", doc=f"On the held-out rows: {_doc[0].lower()}{_doc[1:]}")

for _name, _doc in _REWARD_MODEL.items():
    metric(f"reward_model/val_{_name}", doc=f"On the held-out rows: {_doc[0].lower()}{_doc[1:]}")

for _name, _doc in _DISTILL.items():
    metric(f"distill/{_name}", doc=_doc)
    metric(f"distill/val_{_name}", doc=f"On the held-out rows: {_doc[0].lower()}{_doc[1:]}")
metric("distill/tokens", doc="Tokens of given answers that the step learned from.")
metric("distill/reverse_kl", doc="Mean over sampled tokens of log student minus log teacher.")
metric("preference/tied_fraction", doc="Share of groups without a pair (online_dpo).")

for _part, _meaning in _PART.items():
    for _name, _doc in _PART_SIZE.items():
        metric(f"parity/{_part}_{_name}", doc=_doc.format(_meaning))

metric("reward/<component...>/mean", doc="Mean of one component of the reward.")
metric("reward/<component...>/faults", doc="Rollouts for which the component has no value.")
metric("data/share/<name>", doc="Share of the step's prompts that a training file gave.")
metric("rollout_corr/<name>", doc="Mismatch between sampler and trainer; see rollout correction.")
metric("training/<name>", doc="Differences of probabilities between sampler and trainer.")
metric("time/step", unit="s", doc="Seconds of the step's phases together.")
metric(
    "time/publish",
    unit="s",
    doc="Seconds in which ranks digest and gather new weights and replicas load and confirm them.",
)
metric(
    "publish/bytes",
    unit="B",
    doc="Bytes of the weights that were published; the first step includes the initial publish.",
)
metric("publish/parameters", doc="Parameters that were published: few where an adapter learns.")
for _name, (_unit, _doc) in _ROLE.items():
    metric(f"role/<role>/{_name}", unit=_unit, doc=_doc)
for _name, _doc in _WAIT.items():
    metric(f"wait/{_name}", unit="s", doc=_doc)
metric("time/tokens_per_s", unit="1/s", doc="Tokens of the step by its seconds.")
