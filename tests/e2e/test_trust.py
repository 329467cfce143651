"""A run directory of somebody else runs none of its code, unless one is told to trust it."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import yaml
from click.testing import Result
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from luyen.base.digests import VARIABLE, signed, text_with_checksum
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.cli.main import app
from luyen.config.trust import NAME, UnsignedRun, require_trust
from luyen.pipeline.policy_loading import read_config
from luyen.train.start import run_training
from tests.runs import close, prepare, report_of, train

PLUGIN = "from pathlib import Path\nPath({mark!r}).touch()\n"
ACTS = {
    "export": ["export", "RUN", "OUT"],
    "eval": ["eval", "RUN", "data.val_files=arithmetic://sum?digits=1&size=4"],
    "eval against": ["eval", "builtin://arithmetic", "--against", "RUN"],
    "eval with its file": ["eval", "builtin://arithmetic", "--config", "RUN/config.yaml"],
    "chat": ["chat", "RUN", "--message", "1+1="],
    "serve": ["serve", "RUN", "--port", "0"],
    "replay": ["replay", "RUN", "--step", "1"],
    "rescore": ["rescore", "RUN"],
    "rescore with its file": ["rescore", "OWN", "--reward", "RUN/config.yaml"],
    "reproduce": ["reproduce", "RUN", "--into", "OUT/a/b"],
    "rollout": ["rollout", "RUN"],
    "rollout with its file": ["rollout", "RUN/config.yaml"],
    "profile": ["profile", "RUN/config.yaml", "--out", "OUT"],
    "train": ["train", "RUN/config.yaml", "trainer.default_local_dir=OUT"],
}
"""Commands that act on what a run names."""
READS = {
    "runs": ["runs", "ALL"],
    "doctor": ["doctor", "RUN"],
    "report": ["report", "RUN", "--out", "OUT.html"],
    "diff": ["diff", "RUN", "OWN"],
    "timeline": ["timeline", "RUN"],
    "artifacts": ["artifacts", "list", "ALL"],
    "artifacts verify": ["artifacts", "verify", "ALL"],
    "check": ["check", "RUN/config.yaml"],
}
"""Commands that read one."""
PLAIN = ("reward.custom_reward_function.path=null", "reward.components={length: {rule: length}}")
"""A reward without code."""
NO_RUN = {
    "studio",  # shows runs of other users, and refuses to act on them: tests/unit/web
    "sweep",
    "plan",
    "selftest",
    "init",
    "bench",
    "models",
    "data",
    "explain",
    "schema",
    "version",
} | {"migrate"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run with a plugin that leaves a mark, and another one of the same user."""

    root: Path
    own: Path
    plugin: Path
    mark: Path
    out: Path

    def call(self, words: list[str]) -> Result:
        """A command, in a process that has not imported the plugin."""
        ours = [n for n, m in sys.modules.items() if m.__dict__.get("__file__") == str(self.plugin)]
        for name in ours:
            del sys.modules[name]
        self.mark.unlink(missing_ok=True)
        places = {"RUN": self.root, "OWN": self.own, "OUT": self.out, "ALL": self.root.parents[1]}
        for name, path in places.items():
            words = [word.replace(name, str(path)) for word in words]
        return CliRunner().invoke(app, words)

    def reseal(self, plugin: Path) -> None:
        """Name another plugin, as somebody who knows the seal would."""
        run = RunDirectory(self.root)
        tree = yaml.safe_load(run.read_config())
        tree["trainer"]["plugins"] = [str(plugin)]
        run.config.write_text(text_with_checksum(yaml.safe_dump(tree)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    home = tmp_path_factory.mktemp("trust")
    plugin, mark = home / "plugin.py", home / "mark"
    plugin.write_text(PLUGIN.format(mark=str(mark)))
    named = f"trainer.plugins=[{plugin}]"
    for name in ("one", "two"):
        run_training(report_of(home / "runs", named, f"trainer.experiment_name={name}"))
    assert mark.is_file()
    runs = home / "runs" / "luyen"
    return Place(root=runs / "one", own=runs / "two", plugin=plugin, mark=mark, out=home / "out")


@pytest.fixture
def place(made: Place, tmp_path: Path) -> Iterator[Place]:
    """The same, to be changed."""
    runs = tmp_path / "runs"
    shutil.copytree(made.root.parents[1], runs)
    plugin = made.plugin.read_text()
    yield Place(
        root=runs / made.root.relative_to(made.root.parents[1]),
        own=runs / made.own.relative_to(made.own.parents[1]),
        plugin=made.plugin,
        mark=made.mark,
        out=tmp_path / "out",
    )
    made.plugin.write_text(plugin)


def other_key(folder: Path, patched: pytest.MonkeyPatch) -> None:
    """From here on another user is meant, who has a key too."""
    patched.setenv(VARIABLE, str(folder / "other" / "key"))
    signed({})


def told(result: Result) -> str:
    return f"{result.output} {result.exception}"


def test_every_command_is_known_to_act_on_runs_or_not():
    group = get_command(app)
    names = set(group.list_commands(Context(group)))  # type: ignore[attr-defined]
    named = {words[0] for words in [*ACTS.values(), *READS.values()]}
    assert names == named | NO_RUN


@pytest.mark.parametrize("name", ACTS)
def test_a_command_that_would_import_code_of_another_user_refuses(
    name: str, made: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if "OWN" in ACTS[name]:
        monkeypatch.setattr("luyen.studio.rescore.require_trust", lambda *_, **__: None)
    other_key(tmp_path, monkeypatch)
    done = made.call(ACTS[name])
    assert done.exit_code != 0
    assert "signed with another key" in told(done)
    assert "--trust" in told(done)
    assert not made.mark.exists()
    assert not made.out.exists()


@pytest.mark.parametrize("name", READS)
def test_a_command_that_reads_a_run_of_another_user_imports_nothing(
    name: str, made: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other_key(tmp_path, monkeypatch)
    done = made.call(READS[name])
    assert not isinstance(done.exception, UserError), told(done)
    assert "--trust" not in told(done)
    assert not made.mark.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_ones_own_run_needs_no_trust_and_a_trusted_one_is_taken_as_it_is(
    trust: bool, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if trust:
        other_key(tmp_path, monkeypatch)
    done = place.call([*ACTS["export"], *(["--trust"] if trust else [])])
    assert done.exit_code == 0, told(done)
    assert place.mark.is_file()


def refused(place: Place, why: str) -> None:
    place.mark.unlink(missing_ok=True)
    with pytest.raises(UserError, match=why) as error:
        require_trust(RunDirectory(place.root), is_trusted=False)
    assert "--trust" in error.value.fix
    assert not place.mark.exists()


def test_a_run_that_was_changed_or_half_replaced_is_refused(place: Place, tmp_path: Path):
    signature = place.root / NAME
    require_trust(RunDirectory(place.root), is_trusted=False)
    kept = signature.read_bytes()
    signature.unlink()
    refused(place, "it has no signature")
    signature.write_text("{}")
    refused(place, "signed with another key")
    shutil.copy(place.own / NAME, signature)
    refused(place, "its run_id is not what was signed")
    signature.write_bytes(kept.replace(b'"hmac": "', b'"hmac": "0'))
    refused(place, "not that of what it holds")
    signature.write_bytes(kept)
    require_trust(RunDirectory(place.root), is_trusted=False)
    place.plugin.write_text("import os\n")
    refused(place, "plugin.py.* has other content")
    place.plugin.unlink()  # what is gone does nothing
    require_trust(RunDirectory(place.root), is_trusted=False)
    place.reseal(tmp_path / "evil.py")
    refused(place, "its configuration is not what was signed")


def test_a_relative_name_means_the_file_that_would_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for folder, content in (("here", "A = 1\n"), ("there", "A = 2\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.py").write_text(content)
    monkeypatch.chdir(tmp_path / "here")
    run = prepare(tmp_path / "runs", "trainer.plugins=[plugin.py]")
    directory = run.recorder.directory
    close(run)
    require_trust(directory, is_trusted=False)
    monkeypatch.chdir(tmp_path / "there")
    require_trust(directory, is_trusted=False)
    named = read_config([directory.config], []).trainer.plugins
    assert named == (str(tmp_path / "here" / "plugin.py"),)
    (tmp_path / "here" / "plugin.py").write_text("A = 3\n")
    with pytest.raises(UserError, match="has other content"):
        require_trust(directory, is_trusted=False)
    (tmp_path / "here" / "plugin.py").unlink()  # what is gone does nothing
    require_trust(directory, is_trusted=False)


def test_a_run_that_names_nothing_needs_no_trust_but_to_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = prepare(tmp_path / "runs", *PLAIN)
    directory = run.recorder.directory
    close(run)
    other_key(tmp_path, monkeypatch)
    require_trust(directory, is_trusted=False)
    with pytest.raises(UserError, match="the folder and the environment of its process"):
        require_trust(directory, is_trusted=False, is_run_again=True)


def test_a_reference_to_the_environment_is_not_read_for_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET", "planted-value")
    named = "reward.custom_reward_function.reward_kwargs.a=${oc.env:SECRET}"
    run = prepare(tmp_path / "runs", *PLAIN, named)
    close(run)
    other_key(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="act on the environment in reward"):
        require_trust(run.recorder.directory, is_trusted=False)


def test_where_no_key_can_be_made_the_run_goes_on_unsigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, "/proc/nowhere/key")
    with pytest.warns(UnsignedRun, match="cannot be made"):
        run = prepare(tmp_path / "runs")
    close(run)
    directory = run.recorder.directory
    assert not (directory.root / NAME).exists()
    with pytest.raises(UserError, match="it has no signature"):
        require_trust(directory, is_trusted=False)
    require_trust(directory, is_trusted=True)


def test_a_run_that_goes_on_is_signed_by_who_goes_on_with_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The configuration is the caller's, and what a foreign directory adds is data."""
    other_key(tmp_path, monkeypatch)
    words = ["trainer.total_training_steps=3", "trainer.experiment_name=one"]
    ran = train(place.root.parents[1], *words)
    assert ran.root == place.root
    assert len(ran.metrics) == 3
    require_trust(RunDirectory(place.root), is_trusted=False)
