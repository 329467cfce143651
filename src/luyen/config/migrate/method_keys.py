"""Keys of single methods: sampling and advantages, preferences, supervised loss, reward models."""

from pathlib import Path
from typing import Any, cast

from luyen.base.input_files import is_file
from luyen.config.catalog import PREFERENCE_LOSSES
from luyen.config.loader.aliases import LOSSES, STAGES
from luyen.config.migrate.common import ENGINE, always, choose, engine, mapped, named, never
from luyen.config.migrate.report import Entry, Outcome, Rule, SourceConfig, implied, keep, missing
from luyen.config.migrate.trainer_keys import (
    ACTOR,
    MARKED,
    is_online,
    rows_of_generation,
    updates_of_step,
)

ROLLOUT = "actor_rollout_ref.rollout"
_POLICY = f"{ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
_PREFERENCE = ("dpo", "ipo", "orpo", "cpo", "simpo", *MARKED)


_STAGES: dict[str, dict[str, Any]] = {
    "sft": {"trainer.stage": "sft"},
    "gdpo": {"trainer.stage": "rl", "algorithm.adv_estimator": "gdpo"},
    "prm": {"trainer.stage": "reward_model", "reward_training.objective": "process"},
}
"""Methods that have no word in the configuration."""


def stage_of(source: SourceConfig) -> dict[str, Any]:
    """Keys that say what is trained how."""
    if source.method in _PREFERENCE:
        return {"trainer.stage": "preference", **_preference_loss(source).keys}
    return dict(_STAGES.get(source.method) or STAGES[source.method])


# Answers that are sampled.


def _beta(value: Any, source: SourceConfig) -> Outcome:
    if source.method in _PREFERENCE:
        return _hparam("beta")(value, source)
    if source.method in ("rloo", "ppo"):
        if not value:
            return keep({"algorithm.use_kl_in_reward": False})
        keys = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": float(value)}
        return keep(keys, "KL is subtracted from the reward")
    if not is_online(source):
        return missing("this stage has no such term")
    if not value:
        return keep({f"{ACTOR}.use_kl_loss": False})
    return keep(
        {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": float(value),
            f"{ACTOR}.kl_loss_type": "low_var_kl",
        },
        "KL is added to the loss (k3)",
    )


_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _loss_type(value: Any, source: SourceConfig) -> Outcome:
    if source.method in _PREFERENCE:
        return _preference_loss(source)
    if source.method == "sft":
        name = {"chunked_nll": "nll"}.get(str(value), str(value))
        return keep({"sft.loss": name}) if name in ("nll", "dft") else missing("nll or dft")
    if not is_online(source):
        return missing("the stage has one loss")
    name, is_sequence = str(value), source.get("importance_sampling_level") == "sequence"
    if name in _AGGREGATIONS and not (is_sequence and name == "grpo"):
        return keep({f"{ACTOR}.loss_agg_mode": _AGGREGATIONS[name]}, _aggregated(name))
    if name == "grpo":
        return implied("gspo's own aggregation")
    if name == "cispo":
        high = source.get("epsilon_high") or source.get("epsilon") or 0.2
        return keep({f"{_POLICY}.loss_mode": "cispo", f"{_POLICY}.cispo_cap": float(high)})
    if name in ("sapo", "vespo"):
        return keep({f"{_POLICY}.loss_mode": name})
    return missing(f"no loss {name}; those of `luyen explain {_POLICY}.loss_mode` are there")


def _aggregated(name: str) -> str:
    whole = {"bnpo": "over the whole optimizer step, not over each micro-batch"}
    return whole.get(name, "")


def _clip(value: Any, source: SourceConfig) -> Outcome:
    if source.get("loss_type") in ("cispo", "sapo", "vespo"):
        return implied(f"{source.get('loss_type')} does not clip below")
    high = source.get("epsilon_high")
    if high is None:
        return keep({f"{ACTOR}.clip_ratio": float(value)})
    return keep({f"{ACTOR}.clip_ratio_low": float(value)})


def _clip_high(value: Any, source: SourceConfig) -> Outcome:
    if source.get("loss_type") == "cispo":
        return keep({f"{_POLICY}.cispo_cap": float(value)})
    if source.get("loss_type") in ("sapo", "vespo"):
        return implied(f"{source.get('loss_type')} does not clip")
    low = float(source.get("epsilon") or 0.2)
    return keep({f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": float(value)})


def _scaled(value: Any, source: SourceConfig) -> Outcome:
    if source.method == "gdpo":
        return implied("gdpo divides each reward by its own std")
    if value in ("batch",):
        return missing("the std of the group is divided by, or none")
    is_on = value in (True, "group", "true")
    if not is_on:
        return keep({"algorithm.norm_adv_by_std_in_grpo": False})
    return keep({"algorithm.norm_adv_by_std_in_grpo": True})


def _objectives(value: Any, source: SourceConfig) -> Outcome:
    is_each = value == "normalize_then_sum"
    note = "each reward is normalised, then added" if is_each else "rewards are added first"
    if is_each == (source.method == "gdpo"):
        return implied(note)
    return keep({"algorithm.adv_estimator": "gdpo" if is_each else "grpo"}, note)


def _level(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value == "token":
        return implied("ratios are of tokens")
    if value == "sequence":
        return keep({f"{_POLICY}.loss_mode": "gspo"})
    return missing("ratios are of tokens, or of sequences")


def _top_k(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep({f"{ROLLOUT}.top_k": -1 if not value or int(value) <= 0 else int(value)})


def _vllm(value: Any, source: SourceConfig) -> Outcome:
    if not value:
        return keep({ENGINE: "native"}, "the embedded engine, instead of transformers")
    return engine("vllm", source)


def _server_key(ours: str) -> Rule:
    """A key of vLLM's: read where vLLM generates."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        return keep({ours: value}) if _generates_with_vllm(source) else implied(_NATIVE)

    return rule


_NATIVE = "the embedded engine generates"


def _generates_with_vllm(source: SourceConfig) -> bool:
    return bool(source.get("use_vllm")) and engine("vllm", source).keys[ENGINE] == "vllm"


def _sampler_correction(value: Any, source: SourceConfig) -> Outcome:
    if not _generates_with_vllm(source):
        return implied("the embedded engine's log-probabilities are the trainer's")
    return keep({f"{_CORRECTION}.rollout_is": "token" if value else None})


def _episodes(value: Any, source: SourceConfig) -> Outcome:
    rows = rows_of_generation(source)
    return keep({"trainer.total_training_steps": max(1, int(value) // rows)}, f"{rows} a step")


def _reward_model(value: Any, source: SourceConfig) -> Outcome:
    return keep(
        {
            "reward.reward_model.enable": True,
            "reward.reward_model.model_path": source.place(str(value)),
            "reward.components": {"reward_model": {"model": "reward_model"}},
        }
    )


_FUNCTION = (
    "reward functions go into a Python file of their own: reward.custom_reward_function.path and "
    ".name; TRL's signature (completions, **columns) is accepted"
)


def _reward_functions(value: Any, source: SourceConfig) -> Outcome:
    names = cast(list[Any], value) if isinstance(value, list) else [value]
    module, _, name = str(names[0]).rpartition(".")
    file = source.get("reward file") if not module else f"{module.replace('.', '/')}.py"
    is_here = file is not None and is_file(str(Path(source.folder) / str(file)))
    if len(names) == 1 and file is not None and is_here:
        return keep(
            {
                "reward.custom_reward_function.path": source.place(str(file)),
                "reward.custom_reward_function.name": name,
            }
        )
    more = "; add several up in one function" if len(names) > 1 else ""
    return missing(f"{_FUNCTION}{more}")


_KL = {"k1": "kl", "k3": "low_var_kl"}
ONLINE_RULES: dict[str, Rule] = {
    "beta": _beta,
    "loss_type": _loss_type,
    "epsilon": _clip,
    "epsilon_high": _clip_high,
    "delta": named(f"{_POLICY}.ratio_cap"),
    "scale_rewards": _scaled,
    "importance_sampling_level": _level,
    "sapo_temperature_pos": named(f"{ACTOR}.tau_pos"),
    "sapo_temperature_neg": named(f"{ACTOR}.tau_neg"),
    **{
        f"vespo_{name}": named(f"{_POLICY}.vespo_{name}")
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "mask_truncated_completions": never(
        "answers that are cut count: reward.overlong_buffer lowers their reward"
    ),
    "temperature": named(f"{ROLLOUT}.temperature"),
    "top_p": named(f"{ROLLOUT}.top_p"),
    "top_k": _top_k,
    "min_p": mapped(lambda value: {f"{ROLLOUT}.min_p": float(value or 0)}),
    "repetition_penalty": choose(
        lambda value: value == 1, implied("1, as it is"), missing("repetitions are not penalised")
    ),
    "use_vllm": _vllm,
    "vllm_mode": always("an engine shares the devices of training, unless rollout.nnodes is set"),
    "vllm_device": always("an engine shares the devices of training"),
    "vllm_gpu_memory_utilization": named(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _server_key(f"{ROLLOUT}.tensor_model_parallel_size"),
    "vllm_max_model_length": named(f"{ROLLOUT}.max_model_len"),
    "vllm_enable_sleep_mode": named(f"{ROLLOUT}.free_cache_engine"),
    "vllm_importance_sampling_correction": _sampler_correction,
    "vllm_importance_sampling_cap": _server_key(f"{_CORRECTION}.rollout_is_threshold"),
    "reward_funcs": _reward_functions,
    "reward_weights": choose(
        lambda weights: weights in (1, [1]),
        implied("the score of one function"),
        missing("add the functions up with these weights in one function"),
    ),
    "reward_model_path": _reward_model,
    "reward_model": _reward_model,
    "multi_objective_aggregation": _objectives,
    "sync_ref_model": never("the reference is the policy before training, or ref.path"),
    "shuffle_dataset": choose(
        bool, implied("rows are shuffled"), keep({"data.sampler.name": "sequential"})
    ),
    "num_generations_eval": named(f"{ROLLOUT}.val_kwargs.n"),
    "disable_dropout": always("dropout is off"),
    "use_transformers_paged": always(_NATIVE),
    "cast_lm_head_to_fp32": always("log-probabilities are computed in fp32"),
    "top_entropy_quantile": choose(
        lambda value: value == 1, implied("1, as it is"), missing("all sampled tokens are learned")
    ),
    "entropy_coef": named(f"{ACTOR}.entropy_coeff"),
    "cliprange": named(f"{ACTOR}.clip_ratio"),
    "cliprange_value": named("critic.cliprange_value"),
    "ppo_target": mapped(
        lambda value: {
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": float(value),
        }
    ),
    "vf_coef": always("the critic has an optimizer of its own"),
    "gamma": named("algorithm.gamma"),
    "lam": named("algorithm.lam"),
    "kl_estimator": mapped(lambda value: {"algorithm.kl_penalty": _KL.get(str(value), str(value))}),
    "whiten_rewards": never("advantages are whitened, rewards are not"),
    "missing_eos_penalty": never("reward.overlong_buffer lowers the reward of long answers"),
    "total_episodes": _episodes,
}


# Preferences.


def preference_losses(source: SourceConfig) -> tuple[list[str], list[float]]:
    """Losses of ours, and their weights where there are several."""
    if source.method in ("orpo", "simpo", "ipo", "bco"):
        names = [source.method]
    elif source.method == "cpo":
        names = [{"sigmoid": "cpo"}.get(str(source.get("loss_type")), str(source.get("loss_type")))]
    else:
        written = source.get("loss_type") or ("kto" if source.method == "kto" else "sigmoid")
        listed = cast(list[Any], written) if isinstance(written, list) else [written]
        names = [LOSSES.get(str(one), str(one)) for one in listed]
    weights = [float(one) for one in source.get("loss_weights") or [1.0] * len(names)]
    extra = source.get("rpo_alpha")
    if extra:
        names, weights = [*names, "sft"], [*weights, float(extra)]
    return names, weights


def _preference_loss(source: SourceConfig) -> Outcome:
    names, weights = preference_losses(source)
    unknown = [name for name in names if name not in PREFERENCE_LOSSES]
    if unknown:
        return missing(f"no loss {unknown[0]}: see `luyen explain preference.loss_type`")
    keys: dict[str, Any] = {"preference.loss_type": names}
    if len(names) > 1:
        keys["preference.loss_weights"] = weights
    return keep(keys)


def _loss_parts(value: Any, source: SourceConfig) -> Outcome:
    del value
    return _preference_loss(source)


def _hparam(ours: str) -> Rule:
    """A number of the loss, where the loss reads it."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        names, _ = preference_losses(source)
        facts = [PREFERENCE_LOSSES[name] for name in names if name in PREFERENCE_LOSSES]
        if not any(ours in fact.hparams for fact in facts):
            return implied(f"{' + '.join(names)} does not read it")
        return keep({f"preference.{ours}": value})

    return rule


def _divergence(value: Any, source: SourceConfig) -> Outcome:
    return _hparam("f_divergence_type")(str(value).lower(), source)


PREFERENCE_RULES: dict[str, Rule] = {
    "beta": _beta,
    "loss_type": _loss_type,
    "loss_weights": _loss_parts,
    "rpo_alpha": _loss_parts,
    "f_divergence_type": _divergence,
    **{
        name: _hparam(name)
        for name in (
            *("label_smoothing", "f_alpha_divergence_coef", "discopop_tau", "cpo_alpha"),
            *("simpo_gamma", "alpha", "desirable_weight", "undesirable_weight"),
        )
    },
    "ld_alpha": named("preference.ld_alpha"),
    "ref_model": named("actor_rollout_ref.ref.path"),
    "precompute_ref_log_probs": choose(
        bool, keep({"preference.reference": "precomputed"}), implied("live, as it is")
    ),
    "reference_free": never("choose a loss without a reference, such as simpo"),
    "use_weighting": never("pairs count alike"),
    "sync_ref_model": never("the reference is the policy before training, or ref.path"),
    "ref_model_sync_steps": never("the reference is the policy before training, or ref.path"),
    "ref_model_mixup_alpha": never("the reference is the policy before training, or ref.path"),
    "disable_dropout": always("it decides about `lora_dropout`; models have no other dropout"),
    "truncation_mode": always("rows that are too long are dropped, not cut"),
    "generate_during_eval": never("`luyen eval` generates from a checkpoint"),
    "use_logits_to_keep": always("only the tokens of answers reach the head"),
}


# Supervised loss and reward models.


def _assistant_only(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value:
        return keep({"sft.learn": "assistant"})
    return missing("only what the assistant says is learned")


def _completion_only(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep({"sft.learn": "completion"}) if value else missing("prompts are not learned")


SFT_RULES: dict[str, Rule] = {
    "loss_type": _loss_type,
    "packing_strategy": always("batches are packed"),
    "eval_packing": always("validation measures every row"),
    "assistant_only_loss": _assistant_only,
    "completion_only_loss": _completion_only,
    "eos_token": always("the end of turn is that of the chat template"),
    "truncation_mode": always("rows that are too long are dropped, not cut"),
    "activation_offloading": named("actor_rollout_ref.model.enable_activation_offload"),
}
REWARD_RULES: dict[str, Rule] = {
    "center_rewards_coefficient": mapped(
        lambda value: {"reward_training.center_rewards_coefficient": float(value or 0)}
    ),
    "disable_dropout": always("it decides about `lora_dropout`; models have no other dropout"),
}


def rules_of(method: str) -> dict[str, Rule]:
    """Rules of one method."""
    if method in _PREFERENCE:
        return PREFERENCE_RULES
    if method in ("reward", "prm"):
        return REWARD_RULES
    return SFT_RULES if method == "sft" else ONLINE_RULES


def design_defaults(source: SourceConfig) -> list[Entry]:
    """What a tool does without a key for it, where Luyen does otherwise."""
    chosen: dict[str, tuple[Any, dict[str, Any], str]] = {
        "repeated rows": ("kept", {"data.filter_duplicates": False}, ""),
    }
    if source.method == "grpo" and source.get("scale_rewards") not in (False, "none", "batch"):
        chosen["epsilon of the std"] = (1e-4, {"algorithm.std_epsilon": 1e-4}, "")
    clips = source.get("loss_type") in (*_AGGREGATIONS, None)
    is_token = source.get("importance_sampling_level") != "sequence"
    if source.method == "grpo" and updates_of_step(source) > 1 and clips and is_token:
        chosen["dual clip"] = ("none", {f"{ACTOR}.clip_ratio_c": 1e9}, "")
    if (
        source.method == "sft"
        and source.tool == "TRL"
        and not (source.has("assistant_only_loss") or source.has("completion_only_loss"))
    ):
        note = "TRL learns every token of a conversation, Luyen those of the assistant"
        chosen["assistant_only_loss"] = (False, {}, note)
    return [
        Entry(
            source=name,
            value=value,
            outcome=Outcome(keys=keys, is_implied=not keys, note=note),
            is_default=True,
        )
        for name, (value, keys, note) in chosen.items()
    ]
