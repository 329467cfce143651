"""Which keys may change when a run resumes, and the default name of a new run.

A run is its stage, model, adapter, training rows, reward and algorithm. The table lists every key
that may be another when it goes on; any other key that differs is refused, before anything is
written. `check` and `train` ask the same function.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast, final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_tree
from luyen.config.fields import all_fields
from luyen.config.loader.parse import masked_values, stored_values
from luyen.config.loader.paths import FILES, MODELS, start_folder, whole
from luyen.config.loader.tree import ConfigTree, nested, value_in
from luyen.config.named_files import named_files
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.run import RunConfig
from luyen.telemetry.artifacts import NAME, current, hash_files, hash_of, read_artifacts

Kind = Literal[
    "place", "records", "length", "validation", "optimizer", "sampling", "code", "machine"
]
_ARR = "actor_rollout_ref"
_TURNS = f"{_ARR}.rollout.multi_turn"
MAY_CHANGE: Mapping[Kind, tuple[str, ...]] = {
    "place": (
        "trainer.default_local_dir",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.resume_mode",
        "trainer.resume_from_path",
    ),
    "records": (
        "trainer.logger",
        "trainer.log_train_generations",
        "trainer.log_val_generations",
        "trainer.watchdog",
        "trainer.timeouts",
        "trainer.profile",
        "trainer.save_freq",
        "trainer.async_save",
        "trainer.max_ckpt_to_keep",
        "trainer.keep_best",
        "trainer.best_metric",
        "trainer.best_mode",
    ),
    "length": (
        "trainer.total_training_steps",
        "trainer.total_epochs",
        "trainer.early_stopping",
    ),
    "validation": (
        "data.val_files",
        "data.val_max_samples",
        "trainer.test_freq",
        "trainer.val_before_train",
        f"{_ARR}.rollout.val_kwargs",
    ),
    # The state of another optimizer (name) does not fit, so that its name stays.
    "optimizer": tuple(
        f"{side}.optim.{name}"
        for side in (f"{_ARR}.actor", "critic")
        for name in OptimConfig.model_fields
        if name != "name"
    ),
    "sampling": (
        "data.max_response_length",
        f"{_ARR}.rollout.temperature",
        f"{_ARR}.rollout.top_k",
        f"{_ARR}.rollout.top_p",
        f"{_ARR}.rollout.min_p",
        f"{_ARR}.rollout.min_new_tokens",
        f"{_ARR}.rollout.stop",
        f"{_ARR}.rollout.stop_token_ids",
        f"{_TURNS}.on_unknown",
        f"{_TURNS}.on_fault",
        f"{_TURNS}.fault_retries",
        f"{_TURNS}.tool_timeout_s",
        f"{_TURNS}.time_budget_s",
        "reward.timeout_s",
        "reward.on_fault",
        "reward.max_fault_share",
        "reward.max_outside_share",
        "trainer.max_staleness",
        "trainer.async_order",
    ),
    "code": ("trainer.plugins",),  # what they register counts only where another key names it
    "machine": (
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.device",
        "trainer.runtime",
        f"{_ARR}.model.enable_gradient_checkpointing",
        f"{_ARR}.model.enable_activation_offload",
        f"{_ARR}.model.use_remove_padding",
        f"{_ARR}.model.use_fused_kernels",
        f"{_ARR}.model.tiled_mlp",
        f"{_ARR}.actor.strategy",
        f"{_ARR}.actor.fsdp_config",
        f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
        f"{_ARR}.actor.use_dynamic_bsz",
        f"{_ARR}.actor.ppo_max_token_len_per_gpu",
        f"{_ARR}.rollout.name",
        f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu",
        f"{_ARR}.rollout.log_prob_use_dynamic_bsz",
        f"{_ARR}.rollout.log_prob_max_token_len_per_gpu",
        f"{_ARR}.rollout.gpu_memory_utilization",
        f"{_ARR}.rollout.tensor_model_parallel_size",
        f"{_ARR}.rollout.data_parallel_size",
        f"{_ARR}.rollout.expert_parallel_size",
        f"{_ARR}.rollout.nnodes",
        f"{_ARR}.rollout.n_gpus_per_node",
        f"{_ARR}.rollout.deterministic",
        f"{_ARR}.rollout.enforce_eager",
        f"{_ARR}.rollout.free_cache_engine",
        f"{_ARR}.rollout.cuda_ipc",
        f"{_ARR}.rollout.enable_prefix_caching",
        f"{_ARR}.rollout.max_num_batched_tokens",
        f"{_ARR}.rollout.max_model_len",
        f"{_ARR}.rollout.max_num_seqs",
        f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
        f"{_ARR}.ref.log_prob_use_dynamic_bsz",
        f"{_ARR}.ref.log_prob_max_token_len_per_gpu",
        f"{_ARR}.ref.nnodes",
        f"{_ARR}.ref.n_gpus_per_node",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.use_dynamic_bsz",
        "critic.ppo_max_token_len_per_gpu",
        "critic.nnodes",
        "critic.n_gpus_per_node",
        "reward.num_workers",
        "reward.memory_mb",
        "reward.cache",
        "reward.reward_model.enable_resource_pool",
        "reward.reward_model.nnodes",
        "reward.reward_model.n_gpus_per_node",
        "reward.reward_model.param_offload",
        "reward.reward_model.rollout",
        "sandbox",
    ),
}
"""Keys, and blocks with all keys below them, that may change when a run resumes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedKey:
    """A key that is another than when the run last began or went on.

    Example:
        >>> ChangedKey(key="trainer.save_freq", before=5, now=10, kind="records").words()
        'trainer.save_freq 5 -> 10'
    """

    key: str
    """Dotted key."""
    before: Any
    """What the run has, without secrets."""
    now: Any
    """What it is to have."""
    kind: Kind | None
    """Where the table lists it; None: it may not change."""

    def words(self) -> str:
        """One line for people."""
        return f"{self.key} {_short(self.before)} -> {_short(self.now)}"


def kind_of(key: str) -> Kind | None:
    """Where the table lists a key; None: it may not change.

    Example:
        >>> kind_of("actor_rollout_ref.actor.optim.lr"), kind_of("trainer.seed")
        ('optimizer', None)
    """
    for kind, names in MAY_CHANGE.items():
        if any(key == name or key.startswith(f"{name}.") for name in names):
            return kind
    return None


def changed_keys(directory: RunDirectory, config: RunConfig) -> list[ChangedKey]:
    """Keys that differ from the configuration of a run; none where that one is damaged.

    A file with the same content at another path counts as the same.
    """
    try:
        written = directory.read_settings()
    except UserError:
        return []  # reported when the run is resumed
    folder = start_folder(directory) or Path.cwd()
    now, clean = stored_values(config), masked_values(config)
    found: list[ChangedKey] = []
    for key, info in all_fields().items():
        was = _value(written, key, info.default)
        if _plain(whole(key, was, folder)) == _plain(whole(key, value_in(now, key), Path.cwd())):
            continue
        if kind_of(key) is None and _holds_the_same(directory, key, config):
            continue
        before = masked_tree(_plain(was), key.rpartition(".")[2])
        kind = kind_of(key)
        found.append(ChangedKey(key=key, before=before, now=value_in(clean, key), kind=kind))
    return found


def has_progress(directory: RunDirectory) -> bool:
    """Whether a run has done anything that another configuration would not fit to."""
    try:
        files = (directory.metrics, directory.digests)
        is_measured = any(file.is_file() and file.stat().st_size for file in files)
        return is_measured or any(directory.checkpoints.glob("step_*"))
    except OSError:
        return True


def _value(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    """What a run's file has at a key; the default for a key that its version did not know."""
    try:
        return value_in(cast(dict[str, Any], tree), key)
    except (KeyError, TypeError):
        return default


def _plain(value: Any) -> Any:
    """The value as YAML gives it back."""
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(list[Any], value)]
    return value


def _holds_the_same(directory: RunDirectory, key: str, config: RunConfig) -> bool:
    """Whether a key names other files with the content of those that the run began with."""
    if key == "data.train_files":
        return _same_rows(directory, config)
    if key not in (*FILES, *MODELS):
        return False
    try:
        noted = cast(dict[str, Any], directory.read_manifest().get("files") or {})
    except UserError:
        return False
    before = {name: facts["fingerprint"] for name, facts in noted.items() if _is_of(name, key)}
    now = {
        one.name: one.fingerprint()
        for one in named_files(config, Path.cwd())
        if _is_of(one.name, key)
    }
    return bool(before) and before == now


def _is_of(name: str, key: str) -> bool:
    return name == key or name.startswith((f"{key}.", f"{key}:"))


def _same_rows(directory: RunDirectory, config: RunConfig) -> bool:
    """Whether all rows are files, with the content that the run noted in the same order."""
    try:
        noted = current(read_artifacts(directory.root / NAME))
        now = [hash_of(hash_files(expanded(path))) for path in config.data.train_files]
    except (UserError, OSError):
        return False
    known = {one.used_as: one.hash for one in noted}
    before = [known.get(f"data.train_files.{number}") for number in range(len(now))]
    is_longer = f"data.train_files.{len(now)}" in known or "data.train_files" in known
    return bool(now) and before == now and not is_longer


def _short(value: Any, most: int = 80) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def model_changes(directory: RunDirectory, files: Mapping[str, Any]) -> Iterator[str]:
    """Keys of models whose files changed since the run began; `files` as in a manifest."""
    noted = cast(dict[str, Any], directory.read_manifest().get("files") or {})
    for name, facts in files.items():
        key = next((key for key in MODELS if _is_of(name, key)), None)
        was = noted.get(name, {}).get("fingerprint")
        if key is not None and was is not None and was != facts["fingerprint"]:
            yield key


# Default name of a new run, and the overrides that resume a run by its directory.


def default_run_name(files: Sequence[Path], now: datetime | None = None) -> ConfigTree:
    """The name of a new run: its last configuration file and the time; nothing without a file.

    Two runs without a name are two runs, whatever their files say.

    Example:
        >>> default_run_name([Path("math/grpo.yaml")], datetime(2026, 1, 2, 3, 4, 5)).values
        {'trainer': {'experiment_name': 'grpo-20260102-030405'}}
    """
    if not files:
        return ConfigTree(values={}, origins={})
    when = now or datetime.now().astimezone()
    name = f"{files[-1].stem}-{when:%Y%m%d-%H%M%S}"
    return ConfigTree(values=nested(["trainer", "experiment_name"], name), origins={})


def resume_arguments(run: Path) -> tuple[Path, list[str]]:
    """The configuration of a run, and the overrides that name its directory, to resume it.

    A UserError where there is no run.
    """
    directory = RunDirectory.open(run)
    place = directory.root.resolve()
    if len(place.parts) < 4:
        why = "a run is two folders below the one that trainer.default_local_dir names"
        raise UserError("--resume", str(run), why, "move it to DIR/PROJECT/EXPERIMENT")
    names = {
        "default_local_dir": place.parent.parent,
        "project_name": place.parent.name,
        "experiment_name": place.name,
        "resume_mode": "auto",
    }
    overrides = [f"trainer.{key}={json.dumps(str(value))}" for key, value in names.items()]
    return directory.config, [*overrides, "trainer.resume_from_path=null"]
