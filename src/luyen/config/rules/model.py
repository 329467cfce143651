"""M: weights, adapters, optimizer, model files, and whether adapter and teacher fit the model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from luyen.base.errors import did_you_mean
from luyen.base.input_files import is_directory
from luyen.config.catalog import ROUTED_MODELS
from luyen.config.model_folder.check import (
    adapter_faults,
    folder_remarks,
    model_faults,
    read_adapter_config,
    tokenizer_folder_faults,
    trained_settings,
)
from luyen.config.model_folder.config_json import (
    PLAIN,
    brings_code,
    most_positions,
    plain_type,
    read_config,
    read_raw,
    text_config,
)
from luyen.config.model_folder.files import (
    InvalidFile,
    builtin_names,
    folder_of,
    looks_local,
    path_fault,
)
from luyen.config.model_folder.tokenizer import vocabulary
from luyen.config.model_folder.weights import expected_shapes
from luyen.config.plan import has_teacher
from luyen.config.rules.rule import Finding, RuleContext, rule

_MODEL = "actor_rollout_ref.model"


@rule("M08", "error")
def fast_path_runs_the_model(s: RuleContext) -> Iterator[Finding]:
    """A model that only transformers runs uses the rollout engine `hf`, and is not sharded."""
    model, rollout = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.rollout
    kind = plain_type(model)
    if kind is not None and s.config.trainer.stage == "rl" and rollout.name == "native":
        yield Finding(
            field="actor_rollout_ref.rollout.name",
            why=f"sequences of a {kind} model cannot be packed, which `native` needs",
            fix="set it to hf: slower, through transformers itself",
        )
    for field, raw in s.models_on_devices():
        kind = raw.get("model_type")
        if kind in PLAIN and max(s.where.rank_groups) > 1:
            why = f"transformers itself runs a {kind} model, which is not sharded"
            fix = "train it on one device" if field is None else "name another, or use one device"
            yield Finding(field=field or "trainer.n_gpus_per_node", why=why, fix=fix)


@rule("M09", "note")
def plain_path_is_chosen(s: RuleContext) -> Iterator[Finding]:
    """What is run by transformers itself, or by code that a model brings, is said."""
    model, rollout = s.config.actor_rollout_ref.model, s.config.actor_rollout_ref.rollout
    kind = plain_type(model)
    if kind is not None and (rollout.name == "hf" or s.config.trainer.stage != "rl"):
        yield Finding(
            field=f"{_MODEL}.path",
            why=f"transformers itself runs a {kind} model: padded, slower, its memory not planned",
            fix="take another architecture where speed matters",
        )
    elif kind is None and brings_code(model):
        yield Finding(
            field=f"{_MODEL}.path",
            why="the model brings its own code: whether its sequences can be packed shows when it "
            "is loaded, and memory is planned as for a decoder of its sizes, where it names them",
            fix="if it cannot be packed, set actor_rollout_ref.rollout.name=hf",
        )


@rule("M10", "error")
def sequences_have_positions(s: RuleContext) -> Iterator[Finding]:
    """A model that learned its positions has one for each token of the longest sequence."""
    most, longest = most_positions(s.config.actor_rollout_ref.model), s.batch.longest_sequence
    if most is not None and longest > most:
        yield Finding(
            field="data.max_response_length",
            why=f"sequences may have {longest} tokens, and the model learned {most} positions",
            fix=f"lower it and data.max_prompt_length to {most} together",
        )


@rule("M23", "error")
def load_balance_has_routers(s: RuleContext) -> Iterator[Finding]:
    """A load-balance loss has routers whose layers are known, and whole sequences on each rank."""
    actor = s.config.actor_rollout_ref.actor
    if actor.router_aux_loss_coef == 0.0 or s.config.trainer.stage != "rl":
        return
    field = "actor_rollout_ref.actor.router_aux_loss_coef"
    kind = (read_raw(s.config.actor_rollout_ref.model) or {}).get("model_type")
    if kind is not None and kind not in ROUTED_MODELS:
        why = f"a {kind} model has no routers that are read; {', '.join(ROUTED_MODELS)} have"
        yield Finding(field=field, why=why, fix="set it to 0")
    if actor.fsdp_config.ulysses_sequence_parallel_size > 1:
        why = "loads of experts are counted on ranks that read whole sequences"
        fix = "set it to 0, or fsdp_config.ulysses_sequence_parallel_size to 1"
        yield Finding(field=field, why=why, fix=fix)


@rule("M24", "error")
def routes_are_recorded(s: RuleContext) -> Iterator[Finding]:
    """Experts are recorded by the embedded engine on CPUs, of models whose routers are read."""
    arr = s.config.actor_rollout_ref
    rollout, field = arr.rollout, "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    if s.config.trainer.stage != "rl":
        return
    if not rollout.enable_rollout_routing_replay:
        if arr.actor.router_replay.mode != "disabled":
            why = "the sampler does not record the experts that it chooses"
            mode = "actor_rollout_ref.actor.router_replay.mode"
            yield Finding(field=mode, why=why, fix=f"set {field} to true, or the mode to disabled")
        return
    kind = (read_raw(arr.model) or {}).get("model_type")
    sharding = arr.actor.fsdp_config
    reasons = {
        f"a {kind} model has no routers that are read; {', '.join(ROUTED_MODELS)} have": (
            kind is not None and kind not in ROUTED_MODELS
        ),
        f"`{rollout.name}` does not report experts, and `native` does": (rollout.name != "native"),
        "on a GPU decode steps are captured graphs, which report no experts": (
            rollout.name == "native" and s.where.device == "cuda"
        ),
        "routers are read on ranks that read whole sequences": (
            sharding.ulysses_sequence_parallel_size > 1
        ),
    }
    for why, is_so in reasons.items():
        if is_so:
            yield Finding(field=field, why=why, fix="set it to false")


@rule("M02", "warning")
def model_is_chosen(s: RuleContext) -> Iterator[Finding]:
    """A run on rows of your own names a model of your own."""
    model, data = s.config.actor_rollout_ref.model, s.config.data
    own = [path for path in data.train_files if "://" not in path]
    if own and model.path.startswith("builtin://") and f"{_MODEL}.path" not in s.written:
        yield Finding(
            field=f"{_MODEL}.path",
            why=f"no model is named, so the small built-in one would train on {own[0]}",
            fix="set it to a model directory or a hub id",
        )


@rule("M03", "warning")
def adapter_key_has_effect(s: RuleContext) -> Iterator[Finding]:
    """Adapter keys are changed only when there is an adapter, `lora_init` when it is fresh."""
    model = s.config.actor_rollout_ref.model
    read = {
        "lora_alpha": model.lora_alpha,
        "use_rslora": model.use_rslora,
        "use_dora": model.use_dora,
        "lora_init": model.lora_init,
        "lora_dropout": model.lora_dropout,
        "target_modules": model.target_modules,
        "lora_adapter_path": model.lora_adapter_path,
    }
    for name in read:
        if model.lora_rank == 0 and s.is_changed(f"{_MODEL}.{name}"):
            yield Finding(
                field=f"{_MODEL}.{name}",
                why="lora_rank=0 trains all weights, so it has no effect",
                fix=f"set {_MODEL}.lora_rank, or drop it",
            )
    init = f"{_MODEL}.lora_init"
    if model.lora_rank and model.lora_adapter_path is not None and s.is_changed(init):
        why = "the adapter begins with the weights of lora_adapter_path, so it has no effect"
        yield Finding(field=init, why=why, fix="drop one of the two")


@rule("M04", "warning")
def learning_rate_fits(s: RuleContext) -> Iterator[Finding]:
    """Learning rates learn: above 0, not wild, and higher for adapters."""
    actor, critic = s.config.actor_rollout_ref.actor, s.config.critic
    for field, optim in (
        ("actor_rollout_ref.actor.optim.lr", actor.optim),
        ("critic.optim.lr", critic.optim),
    ):
        if optim.lr == 0:
            yield Finding(field=field, why="nothing is learned at 0", fix="set a rate > 0")
        elif optim.lr > 0.01:
            why = f"{optim.lr} is far above what fine-tuning survives"
            yield Finding(field=field, why=why, fix="start at 1e-6 (all weights) or 1e-5 (LoRA)")
    rank = s.config.actor_rollout_ref.model.lora_rank
    if rank > 0 and 0 < actor.optim.lr < 3e-6:
        yield Finding(
            field="actor_rollout_ref.actor.optim.lr",
            why=f"an adapter of rank {rank} learns about ten times slower than all weights",
            fix="set about 1e-5",
        )


@rule("M05", "note")
def warm_up_ends(s: RuleContext) -> Iterator[Finding]:
    """Warm-up is no longer than the run; otherwise it is shortened to end with it."""
    steps = s.config.trainer.total_training_steps
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if steps is not None and optim.lr_warmup_steps > steps:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps",
                why=f"it would not end in a run of {steps} steps: shortened to {steps}",
                fix=f"set it to at most {steps}",
            )


@rule("M11", "error")
def warm_up_is_given_once(s: RuleContext) -> Iterator[Finding]:
    """Warm-up is given in steps or as a ratio, not as both."""
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            yield Finding(
                field=f"{side}.optim.lr_warmup_steps_ratio",
                why=f"lr_warmup_steps={optim.lr_warmup_steps} decides; the ratio has no effect",
                fix="keep one of the two",
            )


@rule("M13", "error")
def moments_decay(s: RuleContext) -> Iterator[Finding]:
    """AdamW's moments decay: each of its two numbers is at least 0 and below 1."""
    for side, optim in (
        ("actor_rollout_ref.actor", s.config.actor_rollout_ref.actor.optim),
        ("critic", s.config.critic.optim),
    ):
        if not all(0 <= beta < 1 for beta in optim.betas):
            why = "a share of the old moment that is kept is at least 0 and below 1"
            yield Finding(field=f"{side}.optim.betas", why=why, fix="set it to [0.9, 0.999]")


# M: the files of models, tokenizers and adapters, as far as they can be read without torch.

_OVERRIDE = f"{_MODEL}.override_config"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A path that a key names, and what of it is read.

    Example:
        >>> _Use(path="org/name").has_weights
        True
    """

    path: str | None
    """As it is written; None where nothing is named."""
    has_weights: bool = True
    """Whether weights are read."""
    has_head: bool = True
    """Whether they write tokens."""
    has_tokenizer: bool = False
    """Whether the tokenizer in the same folder is read."""
    is_adapter: bool = False
    """Whether they are an adapter's."""
    override: tuple[tuple[str, Any], ...] = ()
    """Values that replace those of the config."""


def _uses(s: RuleContext) -> dict[str, _Use]:
    """Key -> what is read of the model it names."""
    arr, model = s.config.actor_rollout_ref, s.config.actor_rollout_ref.model
    override = tuple(model.override_config.items())
    is_judge = s.config.trainer.stage == "reward_model"
    return {
        f"{_MODEL}.path": _Use(
            path=model.path,
            has_weights=model.init == "pretrained",
            has_head=not is_judge,
            has_tokenizer=model.tokenizer_path is None,
            override=override,
        ),
        f"{_MODEL}.tokenizer_path": _Use(
            path=model.tokenizer_path, has_weights=False, has_tokenizer=True
        ),
        f"{_MODEL}.lora_adapter_path": _Use(path=model.lora_adapter_path, is_adapter=True),
        "critic.model.path": _Use(path=s.config.critic.model.path, override=override),
        "actor_rollout_ref.ref.path": _Use(path=arr.ref.path, override=override),
        "distill.teacher_path": _Use(path=s.config.distill.teacher_path, has_tokenizer=True),
        "reward.reward_model.model_path": _Use(
            path=s.config.reward.reward_model.model_path, has_head=False, has_tokenizer=True
        ),
    }


@rule("M01", "error")
def model_exists(s: RuleContext) -> Iterator[Finding]:
    """Paths of models, tokenizers and adapters that look local are there."""
    for field, use in _uses(s).items():
        if use.path is None:
            continue
        if use.path.startswith("builtin://"):
            if use.path.removeprefix("builtin://") not in builtin_names():
                names = [f"builtin://{name}" for name in builtin_names()]
                fix = did_you_mean(use.path, names)
                yield Finding(field=field, why="no such model ships", fix=fix)
            continue
        wrong = path_fault(use.path)
        if wrong is not None:
            yield Finding(field=field, why=wrong[0], fix=wrong[1])
        elif looks_local(use.path) and not is_directory(use.path):
            yield Finding(
                field=field,
                why="no such directory on this machine",
                fix="give a model directory, a hub id such as org/name, or builtin://arithmetic",
            )


@rule("M06", "error")
def model_files_are_valid(s: RuleContext) -> Iterator[Finding]:
    """Config, weights, tokenizer and chat template of a model can be read and fit each other."""
    for field, use in _uses(s).items():
        folder = _folder(use.path)
        if folder is not None:
            faults = {fault.words: fault for fault in _faults(s, field, use, folder)}
            plain = replace(use, override=())
            own = (
                {fault.words for fault in _faults(s, field, plain, folder)}
                if faults
                else set[str]()
            )
            for words, fault in faults.items():
                # What is wrong only with the values that the run puts in is said of those.
                is_own = words in own or not use.override
                where, fix = (field, fault.fix) if is_own else (_OVERRIDE, f"correct {_OVERRIDE}")
                whose = "" if is_own else f"with it, {use.path} cannot be used: "
                yield Finding(field=where, why=f"{whose}{words}", fix=fix)


@rule("M07", "note")
def template_takes_what_rows_have(s: RuleContext) -> Iterator[Finding]:
    """The chat template writes system messages, and where the assistant begins to speak."""
    model = s.config.actor_rollout_ref.model
    folder = _folder(model.tokenizer_path or model.path)
    field = f"{_MODEL}.path" if model.tokenizer_path is None else f"{_MODEL}.tokenizer_path"
    if folder is not None and not _ships(model.tokenizer_path or model.path):
        for remark in folder_remarks(folder):
            fix = "correct the chat template, unless this is intended"
            yield Finding(field=field, why=remark, fix=fix)


def _folder(path: str | None) -> Path | None:
    """The folder to look into, where there is one."""
    if path is None or (not _ships(path) and path_fault(path) is not None):
        return None
    return folder_of(path)


def _ships(path: str | None) -> bool:
    """Whether a model comes with the package, and is sound as it is."""
    return path is not None and path.startswith("builtin://")


def _faults(s: RuleContext, field: str, use: _Use, folder: Path) -> list[InvalidFile]:
    model = s.config.actor_rollout_ref.model
    if use.is_adapter:
        return adapter_faults(folder, rank=model.lora_rank) if model.lora_rank else []
    if field == f"{_MODEL}.tokenizer_path":
        override = dict(model.override_config)
        return tokenizer_folder_faults(folder, model=folder_of(model.path), override=override)
    override = dict(use.override)
    if _ships(use.path) and not override:
        return []
    found = model_faults(
        folder, override=override, has_weights=use.has_weights, has_head=use.has_head
    )
    if use.has_tokenizer:
        found += tokenizer_folder_faults(folder, model=folder, override=override)
    return found


# M: the adapter fits the model, and the teacher's tokenizer the student's.


_HEADS = ("lm_head", "embed_out")
"""Names of output layers."""


@rule("M12", "error")
def adapter_fits_the_model(s: RuleContext) -> Iterator[Finding]:
    """An adapter is put on linear layers that the model has, with the scale it was trained with."""
    model = s.config.actor_rollout_ref.model
    if model.lora_rank == 0:
        return
    field, fix = f"{_MODEL}.target_modules", "name linear layers of the model, or all-linear"
    if not model.target_modules:
        yield Finding(field=field, why="no module would get an adapter", fix=fix)
    there = _linear_layers(s)
    if there and model.target_modules != ("all-linear",):
        for name in model.target_modules:
            if not any(layer == name or layer.endswith(f".{name}") for layer in there):
                yield Finding(field=field, why=f"the model has no linear layer `{name}`", fix=fix)
    heads = {name for name in model.target_modules if name.rpartition(".")[2] in _HEADS}
    if heads and s.where.device == "cuda":
        why = "the output layer gets an adapter, and scores on a GPU are made from one weight"
        yield Finding(field=field, why=why, fix=f"leave {min(heads)} out")
    for name, trained in _trained_settings(model.lora_adapter_path).items():
        if trained != getattr(model, name):
            why = f"the adapter in {model.lora_adapter_path} was trained with {trained}"
            yield Finding(field=f"{_MODEL}.{name}", why=why, fix=f"set it to {trained}")


def _linear_layers(s: RuleContext) -> list[str]:
    """Names of the linear layers; none where the architecture is not a common one."""
    model = s.config.actor_rollout_ref.model
    folder = folder_of(model.path)
    try:
        config = {} if folder is None else text_config(read_config(folder), model.override_config)
    except InvalidFile:
        return []  # M06 says why
    shapes = expected_shapes(config, (), has_head=True) or {}
    return [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]


def _trained_settings(path: str | None) -> dict[str, Any]:
    folder = None if path is None else folder_of(path)
    try:
        return {} if folder is None else trained_settings(read_adapter_config(folder) or {})
    except InvalidFile:
        return {}  # M06 says why


@rule("H06", "error")
def teacher_reads_the_same_ids(s: RuleContext) -> Iterator[Finding]:
    """The tokens of a teacher have the ids that they have for the student."""
    model, path = s.config.actor_rollout_ref.model, s.config.distill.teacher_path
    if not has_teacher(s.config) or path is None:
        return
    mine, theirs = (_vocabulary(place) for place in (model.tokenizer_path or model.path, path))
    if mine is None or theirs is None or mine == theirs:
        return
    odd = [t for t in sorted(mine.keys() | theirs.keys()) if mine.get(t) != theirs.get(t)]
    why = f"its tokens are not the student's: {len(odd)} have other ids, the first is {odd[0]!r}"
    fix = "take a teacher with the tokenizer of the student"
    yield Finding(field="distill.teacher_path", why=why, fix=fix)


def _vocabulary(path: str) -> dict[str, int] | None:
    folder = folder_of(path)
    try:
        return None if folder is None else vocabulary(folder)
    except InvalidFile:
        return None  # M06 says why
