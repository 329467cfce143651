"""Rules that every tool shares: engines, loggers, paths, names, schedules of the learning rate."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.input_files import read_text
from luyen.config.loader.paths import FILES, MODELS
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.migrate.report import Outcome, Rule, SourceConfig, implied, keep, missing
from luyen.config.model_folder.files import looks_local
from luyen.config.plugins import LOGGERS

OPTIM = "actor_rollout_ref.actor.optim"
ENGINE = "actor_rollout_ref.rollout.name"
SAME_BASE = "the weights below an adapter stay those of the model's files"
"""Why no initialisation takes a part of them into the adapter."""
_PACKAGES = ("wandb", "mlflow", "trackio")
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "wsd": "wsd",
    "warmup_stable_decay": "wsd",
}


def file_text(path: Path) -> str:
    """The text of a file; a UserError where there is none."""
    try:
        return read_text(path)
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise UserError("source", str(path), why, "give a text file that you may read") from error


def file_values(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; a UserError where it is no mapping."""
    tree = read_tree(file_text(path), str(path))
    wrong = [problem for problem in tree.problems if problem.id == "C001"]
    if wrong:
        raise UserError(str(wrong[0].origin), path.name, wrong[0].why, wrong[0].fix)
    return tree.values


def placing(folder: Path, output: Path) -> Callable[[str], str]:
    """Path that starts from `folder` -> the same file as a configuration in `output` names it.

    Example:
        >>> placing(Path("/a/b"), Path("/a/c"))("rows.jsonl"), placing(Path("/a"), Path("/a"))("x")
        ('../b/rows.jsonl', 'x')
    """

    def place(path: str) -> str:
        if "://" in path or path.startswith(("/", "~")) or folder == output:
            return path
        return os.path.relpath(folder / path, output)

    return place


def placed(key: str, value: Any, source: SourceConfig) -> Any:
    """A value of ours with its paths as the new file has to name them."""
    if isinstance(value, list):
        return [placed(key, one, source) for one in cast(list[Any], value)]
    is_path = key in FILES and key != "trainer.default_local_dir"
    is_model = key in MODELS and isinstance(value, str) and looks_local(value)
    is_model = is_model and "://" not in cast(str, value)
    return source.place(value) if isinstance(value, str) and (is_path or is_model) else value


def name_of(key: str) -> Rule:
    """A name becomes part of a folder's name."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        del source
        plain = str(value).strip("/").replace("/", "-").replace("\\", "-")
        note = "" if plain == str(value) else "a name of a folder has no slashes"
        return keep({key: plain}, note)

    return rule


def engine(name: str, source: SourceConfig) -> Outcome:
    """A rollout engine; one whose package is not here gives way to the embedded one."""
    word = name.removesuffix("_async")
    if word in ("hf", "native"):
        return keep({ENGINE: word})
    if word in ("vllm", "sglang") and source.installed(word) and not filters(source):
        return keep({ENGINE: word})
    why = f"{word} is not installed here: set {ENGINE}={word} where it is"
    if word not in ("vllm", "sglang"):
        why = f"there is no adapter for {word}"
    elif source.installed(word):
        why = f"{word} does not report log-probabilities under {', '.join(filters(source))}"
    return keep({ENGINE: "native"}, f"the embedded engine; {why}")


def filters(source: SourceConfig) -> list[str]:
    """Keys that rule tokens out in sampling, which servers cannot account for."""
    rollout = "actor_rollout_ref.rollout."
    found: list[str] = []
    for name in ("top_k", "top_p", "min_p"):
        for key in (name, f"{rollout}{name}", f"{rollout}val_kwargs.{name}"):
            value = source.get(key)
            is_number = isinstance(value, int | float)
            if is_number and (value < 1 if name == "top_p" else value > 0):
                found.append(key)
    return found


def logger(value: Any, source: SourceConfig) -> Outcome:
    """Where metrics go; a logger whose package is not here is left out by name."""
    listed = cast(list[Any], value) if isinstance(value, list) else [value]
    names = [str(one) for one in listed if one not in (None, "none", "all", "console", "file")]
    known = [name for name in names if name in LOGGERS]
    here = [name for name in known if name not in _PACKAGES or source.installed(name)]
    notes = [f"no logger {name}" for name in names if name not in LOGGERS]
    notes += [
        f"{name} is not installed here: add it to trainer.logger where it is"
        for name in known
        if name not in here
    ]
    return keep({"trainer.logger": ["console", *here]}, "; ".join(notes))


def scheduler(name: str, source: SourceConfig) -> Outcome:
    """Course of the learning rate."""
    del source
    ours = _SCHEDULES.get(name)
    if ours is None:
        known = "constant, cosine, linear and wsd"
        return missing(f"no schedule {name}: it is constant after the warm-up; there are {known}")
    note = "the line down is the last tenth of the run" if ours == "wsd" else ""
    return keep({f"{OPTIM}.lr_scheduler_type": ours}, note)


def tried(rule: Rule, value: Any, source: SourceConfig) -> Outcome:
    """What the rule says; a value of another kind than it reads is named."""
    try:
        return rule(value, source)
    except (TypeError, ValueError, OverflowError):
        return missing(f"{value!r} is not a value that this key has: write it by hand")


def always(why: str) -> Rule:
    """The key has no counterpart, and none is needed."""
    return _constant(implied(why))


def refused(why: str) -> Rule:
    """The key has no counterpart, at any value."""
    return _constant(missing(why))


def _constant(outcome: Outcome) -> Rule:
    def rule(value: Any, source: SourceConfig) -> Outcome:
        del value, source
        return outcome

    return rule


def choose(is_so: Callable[[Any], bool], then: Outcome, otherwise: Outcome) -> Rule:
    """One outcome where the value is such, another where it is not."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        del source
        return then if is_so(value) else otherwise

    return rule


def mapped(convert: Callable[[Any], Mapping[str, Any]]) -> Rule:
    """Keys that are made of the value alone."""

    def rule(value: Any, source: SourceConfig) -> Outcome:
        del source
        return keep(convert(value))

    return rule


def never(why: str) -> Rule:
    """The key matters, and there is none of the kind; where it is off, nothing is lost."""
    return choose(_is_off, implied("off, as it is"), missing(why))


def _is_off(value: Any) -> bool:
    return value in (None, False, 0, 0.0, "", "none", "no", "null") or value in ([], {})


def named(*ours: str) -> Rule:
    """The same value under other names."""
    return lambda value, source: keep({key: placed(key, value, source) for key in ours})


# Keys of the Trainer that change no number.

_ROWS = "rows are read and tokenised by the controller"
_LOG = "every step is logged"
NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("preprocessing_num_workers", "dataset_num_proc", "dataloader_num_workers"),
            *("dataloader_prefetch_factor", "dataloader_pin_memory", "overwrite_cache"),
            *("dataset_prepared_path", "dataset_processes", "remove_unused_columns"),
            *("skip_prepare_dataset", "dataloader_drop_last", "dataset_text_field"),
            *("dataloader_persistent_workers", "cache_dir", "data_shared_file"),
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "log_level", "debug"),
            *("log_on_each_node", "log_level_replica", "logging_dir", "disable_tqdm"),
            *(
                "log_completions",
                "num_completions_to_print",
                "plot_loss",
                "include_tokens_per_second",
            ),
            *("include_num_input_tokens_seen", "use_tensorboard", "log_unique_prompts"),
        ),
        _LOG,
    ),
    **dict.fromkeys(
        (
            *("ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "local_rank"),
            *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv"),
            *(
                "flash_attn_fuse_mlp",
                "tf32",
                "torch_compile",
                "attn_implementation",
                "flash_attention",
                "flash_attn",
            ),
            *("use_flash_attention_2", "xformers_attention", "sdp_attention", "eager_attention"),
            *("use_liger", "use_liger_kernel", "enable_liger_kernel", "use_liger_loss", "gc_steps"),
            *("torch_empty_cache_steps", "low_cpu_mem_usage", "ds3_gather_for_generation"),
            *(
                "gradient_checkpointing_kwargs.use_reentrant",
                "use_unsloth_gc",
                "pad_to_sequence_len",
            ),
            *(
                "pad_to_multiple_of",
                "padding_free",
                "pad_token",
                "unsloth",
                "use_unsloth",
                "device_map",
            ),
        ),
        "kernels, memory and padding are the engine's: batches are packed, layers fused",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps"),
        "validation fills its passes by tokens",
    ),
    **dict.fromkeys(
        ("overwrite_output_dir", "save_safetensors", "save_only_model", "do_train", "do_predict"),
        "a run has a directory of its own, and checkpoints hold everything",
    ),
}
HUB_KEYS = (
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_model_revision", "hub_private_repo"),
    *("hub_token", "hub_always_push", "push_to_hub_revision"),
)


def no_dropout(source: SourceConfig, *, is_online: bool) -> Outcome | None:
    """Why an adapter has no dropout, here or in the tool already; None: it has."""
    if is_online:
        return missing("an adapter has no dropout where answers are sampled")
    is_kept = source.tool == "LLaMA-Factory" and source.method == "reward"
    if source.method == "sft" or is_kept or source.get("disable_dropout") is False:
        return None
    return implied(f"{source.tool} switches dropout off: disable_dropout is true by default")


def adapter_init(value: Any, source: SourceConfig) -> Outcome:
    """peft's `init_lora_weights`."""
    del source
    if value is True:
        return implied("A is random and B is zero")
    if value == "gaussian":
        return keep({"actor_rollout_ref.model.lora_init": "gaussian"})
    return missing(f"model.lora_init is kaiming or gaussian: {SAME_BASE}")
