"""Whether a run directory may decide what this process does.

A run's configuration names code, programs, environment variables and addresses. A run that this
user made is signed with a key outside of it (`luyen.base.digests`); any other run is untrusted,
and commands that would act on it refuse without `--trust`. A run that names nothing of the kind
needs no trust, and neither does a command that only reads files.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from luyen.base.digests import NoKey, signed, unsigned
from luyen.base.errors import UserError
from luyen.base.files import json_page, read_json, write_whole
from luyen.base.input_files import read_bytes
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked
from luyen.config.loader.load import load
from luyen.config.loader.one_reading import keep_text
from luyen.config.loader.parse import parse
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.named_files import code_files
from luyen.config.schema.run import RunConfig

NAME = "signature.json"
SCHEMA = 1
_MISSING = "missing"
_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"
_FIX = (
    "look at its config.yaml and at what that names, then give --trust (in Python trust=True); "
    "or make the run yourself"
)


class UnsignedRun(UserWarning):
    """A run could not be signed: later commands will need `--trust`."""


def sign_run(directory: RunDirectory, config: RunConfig) -> None:
    """Say with this user's key that the run is theirs, with the code that it names as it is now.

    Without a key a warning says so, if the run names anything that needs trust.
    """
    page = {
        "schema": SCHEMA,
        **_facts(directory),
        "files": _hashes(config, Path.cwd()),
    }
    try:
        write_whole(directory.root / NAME, json_page(signed(page)), is_private=True)
    except NoKey as error:
        (directory.root / NAME).unlink(missing_ok=True)
        if acts_in(config):
            said = (
                f"the run is not signed: {error}; luyen eval, export and the like will want --trust"
            )
            warnings.warn(said, UnsignedRun, stacklevel=3)


def require_trust(
    directory: RunDirectory,
    *,
    is_trusted: bool,
    folder: Path | None = None,
    is_run_again: bool = False,
) -> None:
    """Raise UserError if the run names code or addresses and this user did not sign it.

    Relative paths begin at `folder`, by default the current one. A run that `is_run_again` gives
    its folder and its environment too. Nothing that the run names is read or imported before its
    signature fits.
    """
    keep_text(directory.config, None)
    if is_trusted:
        return
    # A UserError where it is not as it was written. Its owner could replace it from here on.
    text = directory.read_config()
    keep_text(directory.config, f"\n{text}")  # the first line was its seal
    _refuse_includes(directory, text)
    tree = load([directory.config], [], reads_environment=False)
    named = acts_in(parse(tree).config)
    if is_run_again:
        named = [*named, "the folder and the environment of its process"]
    why = _distrust(directory, folder or Path.cwd()) if named else None
    if why is not None:
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        said = f"it is not known to be yours: {why}. This would act on {named[0]}{more}"
        raise UserError("RUN", str(directory.root), said, _FIX)


def _refuse_includes(directory: RunDirectory, text: str) -> None:
    """Files that it includes could be replaced; no configuration that we write includes any."""
    if "defaults" in read_tree(text, str(directory.config)).values:
        why = "its config.yaml includes other files, which that of no run of ours does"
        raise UserError("RUN", str(directory.root), why, _FIX)


def require_trusted_path(path: str, *, is_trusted: bool) -> None:
    """The same for a checkpoint or a run directory, before anything else is done with it."""
    place = Path(path).expanduser()
    for folder in (place, place.parent.parent):
        if (directory := RunDirectory(folder)).exists:
            require_trust(directory, is_trusted=is_trusted)


def require_trusted_files(files: Sequence[Path], *, is_trusted: bool) -> None:
    """The same for configuration files, where one is that of a run directory."""
    for file in files:
        directory = RunDirectory(file.parent)
        if file.name == directory.config.name and directory.exists:
            require_trust(directory, is_trusted=is_trusted)


def _distrust(directory: RunDirectory, folder: Path) -> str | None:
    """Why the run does not count as this user's; None if it does."""
    place = directory.root / NAME
    if not place.is_file() or not directory.exists:
        return "it has no signature"
    if os.name == "posix" and directory.root.stat().st_uid != os.geteuid():
        return "its folder belongs to another user, who can change it after it was looked at"
    try:
        page = unsigned(read_json(place))
    except NoKey as error:
        return str(error)
    except UserError as error:
        return error.why
    for name, found in _facts(directory).items():
        if page.get(name) != found:
            return f"its {name} is not what was signed"
    # The configuration is ours from here on, so what it names of the environment may be read.
    config = parse(load([directory.config], [])).config
    return _changed_code(page.get("files"), _hashes(config, folder))


def _changed_code(before: Any, now: Mapping[str, str]) -> str | None:
    """The first file that is not as it was; one that is gone can do no harm.

    A file is known by its key and its name: it may be called by another path.
    """
    known = cast(dict[str, str], before) if isinstance(before, dict) else {}
    signed_at: dict[str, set[str]] = {}
    for name, content in known.items():
        signed_at.setdefault(_short_name(name), set()).add(content)
    for name, content in now.items():
        if content != _MISSING and content not in signed_at.get(_short_name(name), set()):
            return f"{name} has other content than when the run was signed"
    return None


def _short_name(name: str) -> str:
    """`KEY (WRITTEN, FILE)`, or `KEY:WRITTEN (WRITTEN, FILE)`, without what was written."""
    key, _, file = name.partition(" (")
    return f"{key.partition(':')[0]} ({file.rpartition(', ')[2]}"


def _facts(directory: RunDirectory) -> dict[str, str]:
    manifest = read_bytes(directory.manifest)
    return {
        "run_id": directory.run_id,
        "manifest": hashlib.sha256(manifest).hexdigest(),
        "configuration": hashlib.sha256(directory.read_config().encode()).hexdigest(),
    }


def _hashes(config: RunConfig, folder: Path) -> dict[str, str]:
    """SHA-256 of every file of code that the configuration names, by key and path."""
    found: dict[str, str] = {}
    for named in code_files(config, folder):
        for file in named.files:
            content = file.read_bytes() if file.is_file() else None
            kind = _MISSING if content is None else hashlib.sha256(content).hexdigest()
            found[masked(f"{named.name} ({named.written}, {file.name})")] = kind
    return found


def acts_in(config: RunConfig) -> list[str]:
    """What a configuration names that runs, is contacted, or is read from the environment.

    Example:
        >>> acts_in(RunConfig())
        []
    """
    rollout, reward = config.actor_rollout_ref.rollout, config.reward
    turns = rollout.multi_turn
    keys: dict[str, Any] = {
        f"{_ROLLOUT}.server.python": rollout.server.python,
        f"{_ROLLOUT}.server_urls": rollout.server_urls,
        f"{_ROLLOUT}.engine_kwargs": rollout.engine_kwargs,
        "trainer.plugins": config.trainer.plugins,
        "reward.custom_reward_function.path": reward.custom_reward_function.path,
        "reward.cache.path": reward.cache.path,
        "data.sampler.class_path": config.data.sampler.class_path,
        f"{_TURNS}.function_tool_path": turns.function_tool_path,
        f"{_TURNS}.tool_config_path": turns.tool_config_path,
        f"{_TURNS}.interaction_config_path": turns.interaction_config_path,
        f"{_TURNS}.environments": turns.environments,
        "actor_rollout_ref.model.trust_remote_code": (
            config.actor_rollout_ref.model.trust_remote_code
        ),
    }
    found = [key for key, value in keys.items() if value]
    free = {"reward": reward.model_dump(), "data": config.data.sampler.kwargs}
    found += [f"{key} in {where}" for where, tree in free.items() for key in _acting(tree)]
    return found + [f"the environment in {key}" for key in config.references]


def _acting(tree: Any) -> Iterator[str]:
    """Words in free arguments that are code or lead to a server."""
    if isinstance(tree, Mapping):
        for name, inner in cast(Mapping[Any, Any], tree).items():
            if name == "judge" and inner:
                yield "a judge"
            yield from _acting(inner)
    elif isinstance(tree, list | tuple):
        for inner in cast(Sequence[Any], tree):
            yield from _acting(inner)
    elif isinstance(tree, str) and (tree.endswith(".py") or ".py:" in tree or "://" in tree):
        yield f"`{tree}`"
