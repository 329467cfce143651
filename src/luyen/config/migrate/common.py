"""Rules that every tool shares: engines, loggers, paths, names, schedules of the learning rate."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.config.loader.paths import FILES, MODELS
from luyen.config.migrate.report import Outcome, Rule, Source, implied, keep, missing
from luyen.config.model_folder.files import looks_local
from luyen.config.plugins import LOGGERS

OPTIM = "actor_rollout_ref.actor.optim"
ENGINE = "actor_rollout_ref.rollout.name"
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


def placed(key: str, value: Any, source: Source) -> Any:
    """A value of ours with its paths as the new file has to name them."""
    if isinstance(value, list):
        return [placed(key, one, source) for one in cast(list[Any], value)]
    is_path = key in FILES and key != "trainer.default_local_dir"
    is_model = key in MODELS and isinstance(value, str) and looks_local(value)
    is_model = is_model and "://" not in cast(str, value)
    return source.place(value) if isinstance(value, str) and (is_path or is_model) else value


def name_of(key: str) -> Rule:
    """A name becomes part of a folder's name."""

    def rule(value: Any, source: Source) -> Outcome:
        del source
        plain = str(value).strip("/").replace("/", "-").replace("\\", "-")
        note = "" if plain == str(value) else "a name of a folder has no slashes"
        return keep({key: plain}, note)

    return rule


def engine(name: str, source: Source) -> Outcome:
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


def filters(source: Source) -> list[str]:
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


def logger(value: Any, source: Source) -> Outcome:
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


def scheduler(name: str, source: Source) -> Outcome:
    """Course of the learning rate."""
    del source
    ours = _SCHEDULES.get(name)
    if ours is None:
        known = "constant, cosine, linear and wsd"
        return missing(f"no schedule {name}: it is constant after the warm-up; there are {known}")
    note = "the line down is the last tenth of the run" if ours == "wsd" else ""
    return keep({f"{OPTIM}.lr_scheduler_type": ours}, note)


def always(why: str) -> Rule:
    """The key has no counterpart, and none is needed."""
    return _constant(implied(why))


def refused(why: str) -> Rule:
    """The key has no counterpart, at any value."""
    return _constant(missing(why))


def _constant(outcome: Outcome) -> Rule:
    def rule(value: Any, source: Source) -> Outcome:
        del value, source
        return outcome

    return rule


def choose(is_so: Callable[[Any], bool], then: Outcome, otherwise: Outcome) -> Rule:
    """One outcome where the value is such, another where it is not."""

    def rule(value: Any, source: Source) -> Outcome:
        del source
        return then if is_so(value) else otherwise

    return rule


def mapped(convert: Callable[[Any], Mapping[str, Any]]) -> Rule:
    """Keys that are made of the value alone."""

    def rule(value: Any, source: Source) -> Outcome:
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
