"""verl: a Hydra YAML, or a command with overrides, for PPO-like training or for SFT.

Keys that both have are carried over. For the rest `luyen.config.loader.aliases` is the one source
of facts: what a key is called here, what is always so, and what is nearest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.input_files import is_file
from luyen.config.catalog import POLICY_LOSSES, TRAINING_ENGINES, training_engine
from luyen.config.fields import all_fields
from luyen.config.loader.aliases import CHANGED_VALUES, MOOT, NOTED, is_noted, nearest, our_name
from luyen.config.loader.load import read_override
from luyen.config.loader.tree import merged
from luyen.config.migrate.common import (
    always,
    choose,
    engine,
    file_values,
    logger,
    name_of,
    named,
    never,
    placed,
    refused,
    scheduler,
    tried,
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
from luyen.config.migrate.shell import flags, open_names, overrides, shown

TOOL = "verl"
_ARR = "actor_rollout_ref"
_MOOT = "; drop the key"
"""How the reason of a key ends without which nothing is lost."""
_ACTOR, _MODEL, _ROLLOUT = f"{_ARR}.actor", f"{_ARR}.model", f"{_ARR}.rollout"
_OPTIM = f"{_ACTOR}.optim"
BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
_MEGATRON = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}


def is_verl(values: Mapping[str, Any]) -> bool:
    """Whether a YAML file is one of verl."""
    return "actor_rollout_ref" in values or (
        isinstance(values.get("data"), Mapping) and isinstance(values.get("trainer"), Mapping)
    )


def read_yaml(values: Mapping[str, Any], source: SourceConfig) -> SourceConfig:
    """The keys of a file, without what it includes."""
    found = {k: v for k, v in values.items() if k not in ("hydra", "defaults")}
    method = "rl" if "actor_rollout_ref" in values or "algorithm" in values else "sft"
    return _source(flat(found), method, source)


def read_words(words: Sequence[str], source: SourceConfig) -> SourceConfig:
    """The overrides of a command, the YAML file that it names included."""
    folder = Path(source.folder)
    module = next((word for word in words if "trainer" in word or "main_" in word), "")
    method = "sft" if "sft" in module else "rl"
    options = flags(words)
    values: dict[str, Any] = {}
    file = _config_file(options, folder)
    if file is not None:
        given = file_values(file)
        values = {k: v for k, v in given.items() if k not in ("hydra", "defaults")}
    found: dict[str, Any] = {}
    for word in overrides(words, module):
        key, equals, raw = word.lstrip("+").partition("=")
        if not equals:
            found[word] = None
            continue
        if open_names(raw):
            found[key] = raw
            continue
        tree = read_override(word)
        values = merged(values, tree.values)
        if tree.problems:
            found[key] = raw
    found |= {word: word for word in words if "=" not in word and open_names(word)}  # any keys
    if file is None and options.get("config-name", "").removesuffix(".yaml") not in ("", *BASES):
        found["--config-name"] = options["config-name"]
    processes = options.get("nproc_per_node") or options.get("nproc-per-node")
    if method == "sft" and processes is not None:
        found["--nproc_per_node"] = int(processes) if processes.isdigit() else processes
    return _source({**flat(values), **found}, method, source)


def _source(values: Mapping[str, Any], method: str, source: SourceConfig) -> SourceConfig:
    if not values:
        raise UserError("source", source.where, "it holds no key of verl", "give its overrides")
    return replace(source, tool=TOOL, method=method, values=values)


def _config_file(options: Mapping[str, str], folder: Path) -> Path | None:
    name = options.get("config-name", "")
    if not name or name.removesuffix(".yaml") in BASES:
        return None
    where = shown(options.get("config-path", "."))
    for place in (folder / where, folder, Path(where)):
        path = place / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        if is_file(str(path)):
            return path
    return None


def entries(source: SourceConfig) -> list[Entry]:
    """What becomes of every key, and the defaults of verl that are not ours."""
    rules = _SFT_RULES if source.method == "sft" else RULES
    found: list[Entry] = []
    for key, value in source.values.items():
        if isinstance(value, str) and open_names(value):
            found.append(_open_entry(key, value, source))
            continue
        if key.startswith("~"):
            why = "it takes a key of verl's own file away: set by hand what it is then"
            found.append(Entry(source=key, value=value, outcome=missing(why)))
            continue
        rule = rules.get(key)
        outcome = _by_name(key, value, source) if rule is None else tried(rule, value, source)
        found.append(Entry(source=key, value=value, outcome=outcome))
    defaults = _SFT_DEFAULTS if source.method == "sft" else _DEFAULTS
    taken = {key for entry in found for key in entry.outcome.keys}
    for name, (key, value) in defaults.items():
        if name not in source.values and key not in taken:
            found.append(
                Entry(source=name, value=value, outcome=keep({key: value}), is_default=True)
            )
    return [*found, *_more_defaults(source, taken)]


def _open_entry(key: str, value: str, source: SourceConfig) -> Entry:
    """A value, or a word of the command, that only a shell knows."""
    todo = (
        "write its keys into the command" if key == value else f"set {_place(key, source)} by hand"
    )
    why = f"the script does not say what {', '.join(open_names(value))} is; {todo}"
    return Entry(source=shown(key), value=shown(value), outcome=by_hand(why))


def _place(key: str, source: SourceConfig) -> str:
    if source.method == "sft" and key in _SFT_NAMES:
        return _SFT_NAMES[key]
    return our_name(key) or key


def _by_name(key: str, value: Any, source: SourceConfig) -> Outcome:
    """The same key, another name for it, or what the catalogue of verl's keys says."""
    ours = key if key in all_fields() else our_name(key)
    if source.method == "sft" and key in _SFT_NAMES:
        ours = _SFT_NAMES[key]
    if ours is not None and ours in all_fields():
        return _fitting(ours, value, source)
    open_block = _open_block(key)
    if open_block is not None:
        return keep({open_block: _below(source, open_block)})
    if is_noted(key, value):
        return implied(NOTED[key][1])
    if key in MOOT:
        accepted, reason = MOOT[key]
        is_so = any(value is one or (value == one and type(value) is type(one)) for one in accepted)
        return implied(reason) if is_so else missing(f"{reason}; drop it")
    if key.rpartition(".")[2] == "_target_" or key.startswith("hydra"):
        return implied("a setting of Hydra: types and search paths need no declaration")
    near = nearest(key)
    if near is not None and near.endswith(_MOOT):
        return implied(near.removesuffix(_MOOT))
    if near not in (None, "nothing yet"):
        return missing(f"nearest here: {near}")
    return missing("Luyen has no such key")


def _fitting(ours: str, value: Any, source: SourceConfig) -> Outcome:
    """A key of ours with a value that it can have."""
    info = all_fields()[ours]
    value = CHANGED_VALUES.get(ours, {}).get(value, value) if isinstance(value, str) else value
    if info.only is not None and value != info.default:
        return missing(info.only)
    if info.default is None and value is None:
        return implied("null, as it is")
    if info.choices and isinstance(value, str) and value not in info.choices:
        return missing(f"{value} is none of {', '.join(info.choices)}")
    return keep({ours: placed(ours, value, source)})


def _open_block(key: str) -> str | None:
    """The key of ours whose value is a mapping, and of which this is an inner name."""
    path = our_name(key) or key
    while "." in path:
        path = path.rpartition(".")[0]
        if path in all_fields():
            return path if all_fields()[path].is_open else None
    return None


def _below(source: SourceConfig, block: str) -> dict[str, Any]:
    """The mapping that the keys below a block make together."""
    tree: dict[str, Any] = {}
    for key, value in source.values.items():
        path = our_name(key) or key
        if path.startswith(f"{block}.") and path not in all_fields():
            inner = path.removeprefix(f"{block}.")
            nested: Any = value
            for name in reversed(inner.split(".")):
                nested = {name: nested}
            tree = merged(tree, cast(dict[str, Any], nested))
    return tree


# Keys whose value means something else here, or that several of ours replace.


def _gpus(source: SourceConfig) -> int:
    """Devices of the run; 0 where the script does not say."""
    sizes = source.get("trainer.nnodes"), source.get("trainer.n_gpus_per_node")
    nodes, each = (usual if n is None else n for n, usual in zip(sizes, (1, 8), strict=True))
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else 0


def _whole_micro_batch(ours: str) -> Rule:
    """The old form counts the sequences of a pass over all devices."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        devices = _gpus(source)
        if value is None:
            return implied("null, as it is")
        if not isinstance(value, int) or devices == 0:
            return missing(f"set {ours}: the number of devices is not known")
        if value % devices:
            return missing(f"{value} sequences over {devices} devices come out even nowhere")
        return keep({ours: value // devices}, f"{value} sequences over {devices} devices")

    return rule


def _lora_targets(value: Any, source: SourceConfig) -> Outcome:
    del source
    names = cast(list[str], value) if isinstance(value, list) else [str(value)]
    ours = [name for one in names for name in _MEGATRON.get(one, [one])]
    return keep({f"{_MODEL}.target_modules": ours})


def _shuffle(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value:
        return implied(MOOT["data.shuffle"][1])
    return keep({"data.sampler.name": "sequential"})


def _aggregation(value: Any, source: SourceConfig) -> Outcome:
    mode = str(source.get(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla")
    own = POLICY_LOSSES[mode].aggregation if mode in POLICY_LOSSES else "token-mean"
    if own != "token-mean":
        return implied(f"{mode} has its own aggregation, {own}, which verl uses whatever is set")
    return keep({f"{_ACTOR}.loss_agg_mode": value})


def _token_level(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep({f"{_ACTOR}.loss_agg_mode": "token-mean" if value else "seq-mean-token-mean"})


def _overlong(name: str) -> Rule:
    return named(f"reward.overlong_buffer.{name}")


def _same_length(value: Any, source: SourceConfig) -> Outcome:
    if value == source.get("data.max_response_length"):
        return implied("the penalty counts back from data.max_response_length")
    return missing("the penalty counts back from data.max_response_length")


def _reward_model(value: Any, source: SourceConfig) -> Outcome:
    del source
    keys: dict[str, Any] = {"reward.reward_model.enable": bool(value)}
    if value:
        keys["reward.components"] = {"reward_model": {"model": "reward_model"}}
    return keep(keys)


def _device(value: Any, source: SourceConfig) -> Outcome:
    del source
    if value in ("cuda", "cpu"):
        return implied("auto takes CUDA where there is one")
    return missing("CUDA and CPU only; drop it")


def _warm_up_style(value: Any, source: SourceConfig) -> Outcome:
    return implied("null, as it is") if value is None else scheduler(str(value), source)


_CRITIC_MODEL = "the critic is trained as the actor is: packed, with its checkpointing"
RULES: dict[str, Rule] = {
    f"{_ROLLOUT}.name": lambda value, source: engine(str(value), source),
    "--config-name": refused(
        "this file is not here: give the folder that it is in as --config-path"
    ),
    "trainer.logger": logger,
    "trainer.device": _device,
    "trainer.project_name": name_of("trainer.project_name"),
    "trainer.experiment_name": name_of("trainer.experiment_name"),
    "data.shuffle": _shuffle,
    f"{_ACTOR}.grad_clip": named(f"{_OPTIM}.clip_grad"),
    "critic.grad_clip": named("critic.optim.clip_grad"),
    f"{_ACTOR}.loss_agg_mode": _aggregation,
    f"{_ACTOR}.use_token_level_loss": _token_level,
    f"{_ACTOR}.use_gpg_loss": choose(
        bool,
        keep({f"{_ACTOR}.policy_loss.loss_mode": "gpg"}),
        implied("vanilla, as it is"),
    ),
    f"{_OPTIM}.warmup_style": _warm_up_style,
    f"{_MODEL}.lora.rank": named(f"{_MODEL}.lora_rank"),
    f"{_MODEL}.lora.alpha": named(f"{_MODEL}.lora_alpha"),
    f"{_MODEL}.lora.adapter_path": named(f"{_MODEL}.lora_adapter_path"),
    f"{_MODEL}.lora.target_modules": _lora_targets,
    f"{_MODEL}.target_modules": _lora_targets,
    f"{_MODEL}.use_rmpad": always("batches are always packed"),
    "critic.model.use_rmpad": always(_CRITIC_MODEL),
    "critic.model.use_remove_padding": always(_CRITIC_MODEL),
    "critic.model.enable_gradient_checkpointing": always(_CRITIC_MODEL),
    "critic.model.lora_rank": never("the critic trains all its weights"),
    f"{_ACTOR}.entropy_checkpointing": always("activations of the head are computed again"),
    "reward_model.enable": _reward_model,
    "reward.reward_model.enable": _reward_model,
    "reward_model.model.use_rmpad": always("conversations are scored in packed passes"),
    "reward_model.model.use_remove_padding": always("conversations are scored in packed passes"),
    "reward_model.model.fsdp_config.param_offload": named("reward.reward_model.param_offload"),
    f"{_ACTOR}.strategy": lambda value, _: (
        keep({f"{_ACTOR}.strategy": value})
        if training_engine(str(value), 2) in TRAINING_ENGINES
        else missing("it has no adapter: fsdp2 is used")
    ),
    "data.tokenizer": named(f"{_MODEL}.tokenizer_path"),
    "data.trust_remote_code": named(f"{_MODEL}.trust_remote_code"),
    "data.tool_config_path": named(f"{_ROLLOUT}.multi_turn.tool_config_path"),
    "trainer.max_actor_ckpt_to_keep": named("trainer.max_ckpt_to_keep"),
    f"{_ACTOR}.fsdp_config.model_dtype": named(f"{_MODEL}.dtype"),
    "algorithm.tis_imp_ratio_cap": named("algorithm.rollout_correction.rollout_is_threshold"),
    **{
        f"{block}.{name}": _whole_micro_batch(f"{ours}.{name}_per_gpu")
        for block, ours, name in (
            (_ACTOR, _ACTOR, "ppo_micro_batch_size"),
            ("critic", "critic", "ppo_micro_batch_size"),
            (_ROLLOUT, _ROLLOUT, "log_prob_micro_batch_size"),
            (f"{_ARR}.ref", f"{_ARR}.ref", "log_prob_micro_batch_size"),
        )
    },
    **{
        f"{block}.{name}": _overlong(name)
        for block in (
            "custom_reward_function.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for name in ("enable", "len", "penalty_factor")
    },
    **{
        f"{block}.overlong_buffer_cfg.log": always("every part of a reward is recorded")
        for block in ("reward_model.reward_kwargs", "reward.reward_kwargs")
    },
    "reward_model.reward_kwargs.max_resp_len": _same_length,
    "reward.reward_kwargs.max_resp_len": _same_length,
}
"""Keys that need more than their name."""

_DEFAULTS: dict[str, tuple[str, Any]] = {
    "data.filter_overlong_prompts": ("data.filter_overlong_prompts", False),
    "data.filter_duplicates": ("data.filter_duplicates", False),
    f"{_OPTIM}.lr": (f"{_OPTIM}.lr", 1e-6),
    "algorithm.adv_estimator": ("algorithm.adv_estimator", "gae"),
    f"{_ROLLOUT}.n": (f"{_ROLLOUT}.n", 1),
    "trainer.n_gpus_per_node": ("trainer.n_gpus_per_node", 8),
    "trainer.save_freq": ("trainer.save_freq", -1),
}
"""Key of verl -> ours and verl's value, where ours is another one."""


def _engine_of(source: SourceConfig) -> str:
    """The rollout engine that is written."""
    name = source.get(f"{_ROLLOUT}.name")
    return "" if name is None else str(engine(str(name), source).keys[f"{_ROLLOUT}.name"])


def _more_defaults(source: SourceConfig, taken: set[str]) -> list[Entry]:
    """Defaults that depend on other keys."""
    found: dict[str, tuple[str, Any]] = {}
    if source.method == "rl":
        written = source.get("data.train_batch_size")
        step = written if isinstance(written, int) else 1024
        if f"{_ACTOR}.ppo_mini_batch_size" not in taken and step > 256 and step % 256 == 0:
            found[f"{_ACTOR}.ppo_mini_batch_size"] = (f"{_ACTOR}.ppo_mini_batch_size", 256)
        micro = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
        if micro in taken and f"{_ACTOR}.use_dynamic_bsz" not in taken:
            found[f"{_ACTOR}.use_dynamic_bsz"] = (f"{_ACTOR}.use_dynamic_bsz", False)
        if _engine_of(source) in ("vllm", "sglang") and _gpus(source) > 1:
            key = f"{_ROLLOUT}.tensor_model_parallel_size"
            found |= {} if key in taken else {key: (key, 2)}
        if source.get(f"{_MODEL}.lora.rank") and f"{_MODEL}.lora_alpha" not in taken:
            found[f"{_MODEL}.lora.alpha"] = (f"{_MODEL}.lora_alpha", 32)
        if "trainer.total_training_steps" not in taken and "trainer.total_epochs" not in taken:
            found["trainer.total_epochs"] = ("trainer.total_epochs", 30)
    return [
        Entry(source=name, value=value, outcome=keep({key: value}), is_default=True)
        for name, (key, value) in found.items()
    ]


# SFT of verl: other names for the same things.

_SFT_NAMES: dict[str, str] = {
    "model.partial_pretrain": f"{_MODEL}.path",
    "model.path": f"{_MODEL}.path",
    "model.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "model.enable_gradient_checkpointing": f"{_MODEL}.enable_gradient_checkpointing",
    "model.lora_rank": f"{_MODEL}.lora_rank",
    "model.lora_alpha": f"{_MODEL}.lora_alpha",
    "model.fsdp_config.model_dtype": f"{_MODEL}.dtype",
    "optim.lr": f"{_OPTIM}.lr",
    "optim.betas": f"{_OPTIM}.betas",
    "optim.weight_decay": f"{_OPTIM}.weight_decay",
    "optim.clip_grad": f"{_OPTIM}.clip_grad",
    "optim.lr_warmup_steps": f"{_OPTIM}.lr_warmup_steps",
    "optim.lr_warmup_steps_ratio": f"{_OPTIM}.lr_warmup_steps_ratio",
    "optim.warmup_steps_ratio": f"{_OPTIM}.lr_warmup_steps_ratio",
    "optim.min_lr_ratio": f"{_OPTIM}.min_lr_ratio",
    "data.max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
}
_COLUMNS = "the format of rows is known by their columns: see `luyen data inspect FILE`"


def _whole_length(value: Any, source: SourceConfig) -> Outcome:
    del source
    return keep(
        {
            "data.max_prompt_length": int(value) // 2,
            "data.max_response_length": int(value) - int(value) // 2,
        },
        "rows of more tokens than both together are dropped, not cut",
    )


_SFT_RULES: dict[str, Rule] = {
    **{key: rule for key, rule in RULES.items() if key.startswith("trainer.")},
    "--nproc_per_node": named("trainer.n_gpus_per_node"),
    "trainer.n_gpus_per_node": named("trainer.n_gpus_per_node"),
    "trainer.nnodes": named("trainer.nnodes"),
    "data.max_length": _whole_length,
    "data.micro_batch_size_per_gpu": always("micro-batches fill by tokens"),
    "data.micro_batch_size": always("micro-batches fill by tokens"),
    "data.use_dynamic_bsz": always("micro-batches fill by tokens"),
    "data.truncation": refused("rows that are too long are dropped"),
    "optim.lr_scheduler": lambda value, source: scheduler(str(value), source),
    "optim.lr_scheduler_type": lambda value, source: scheduler(str(value), source),
    "model.target_modules": _lora_targets,
    "use_remove_padding": always("batches are always packed"),
    "ulysses_sequence_parallel_size": named(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    **{
        f"data.{name}": always(_COLUMNS)
        for name in (
            *("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys"),
            *("messages_key", "tools_key", "enable_thinking_key", "pad_mode"),
            *("multiturn.enable", "multiturn.messages_key", "multiturn.tools_key"),
        )
    },
}
_SFT_DEFAULTS: dict[str, tuple[str, Any]] = {
    "data.filter_duplicates": ("data.filter_duplicates", False),
    "trainer.stage": ("trainer.stage", "sft"),
    "data.train_batch_size": ("data.train_batch_size", 256),
    "data.max_length": ("data.max_response_length", 512),
    "optim.lr": (f"{_OPTIM}.lr", 1e-5),
    "optim.betas": (f"{_OPTIM}.betas", [0.9, 0.95]),
    "optim.lr_scheduler": (f"{_OPTIM}.lr_scheduler_type", "cosine"),
    "optim.warmup_steps_ratio": (f"{_OPTIM}.lr_warmup_steps_ratio", 0.1),
    "trainer.total_epochs": ("trainer.total_epochs", 4),
    "trainer.save_freq": ("trainer.save_freq", -1),
    "trainer.seed": ("trainer.seed", 1),
}
