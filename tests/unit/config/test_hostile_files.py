"""Configurations that mean harm: each is refused at once, with its file, its line and the limit."""

import os
import socket
import time
from pathlib import Path

import pytest

from luyen.cli.check import report_lines
from luyen.config.check import check
from luyen.config.loader.load import DEEPEST, MOST_FILES
from luyen.config.machine import Machine
from luyen.config.pipeline import is_pipeline

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
SECONDS = 5.0
"""Far more than any of these takes, and far less than without limits: minutes, or for ever."""


def refused(path: Path, *words: str) -> list[tuple[str, str, str]]:
    """Id, origin and reason of what is wrong; AssertionError unless it is said, and soon."""
    began = time.process_time()
    report = check([path], words, machine=LAPTOP)
    text = "\n".join(report_lines(report, [str(path)], LAPTOP))
    assert time.process_time() - began < SECONDS
    assert not report.is_sound
    assert len(text) < 100_000
    text.encode()
    return [(p.id, str(p.origin), p.why) for p in report.problems]


def aliases(head: str, inner: str, *, indent: str = "") -> str:
    """Ten blocks, each of which names the one before nine times."""
    lines = [f"a0: &a0 {{{', '.join(f'k{i}: 1' for i in range(9))}}}"]
    for i in range(1, 11):
        named = ", ".join(inner.format(j=j, above=f"*a{i - 1}") for j in range(9))
        lines.append(f"a{i}: &a{i} {head.format(named)}")
    return "".join(f"{indent}{line}\n" for line in lines)


BOMBS = {
    "lists": aliases("[{}]", "{above}"),
    "mappings": aliases("{{{}}}", "k{j}: {above}"),
    "merges": aliases("{{<<: [{}]}}", "{above}"),
    "kwargs": "reward:\n  custom_reward_function:\n    reward_kwargs:\n"
    + aliases("{{{}}}", "k{j}: {above}", indent="      "),
}


@pytest.mark.parametrize("name", BOMBS)
def test_aliases_that_stand_for_millions_are_counted_before_they_are_written_out(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(BOMBS[name])
    assert path.stat().st_size < 1100
    [(rule, origin, why)] = refused(path)
    assert rule == "C001"
    assert origin.startswith(f"{path}:")
    assert why == "it holds more than 100,000 values, aliases written out"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 200 + "1]\n", 2, "8,388,608 characters"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 150)),
            100,
            "nested more than 100 levels deep",
        ),
        ("data: {train_files: &a [x, *a]}\n", 1, "an alias is inside the block that it names"),
        ("trainer:\n  seed: " + "9" * 6000, 2, "a whole number of more than 64 bits"),
        ("trainer:\n  plugins: [!!int 0x" + "f" * 6000 + "]", 2, "more than 64 bits"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("trainer:\n\tnnodes: 1\n", 2, "not valid YAML"),
        ("a: \x00", 1, "control characters"),
    ],
)
def test_text_beyond_a_limit_is_refused_with_its_line(
    text: str, line: int, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    [(rule, origin, said)] = refused(path)
    assert (rule, origin) == ("C001", f"{path}:{line}")
    assert why in said


def test_few_aliases_are_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "\ufefftrainer: &t {nnodes: 2}\ncritic: {}\ndata: {train_files: arithmetic://sum}\n"
    )
    assert check([path], machine=LAPTOP).config.trainer.nnodes == 2


def test_files_that_include_each_other_often_are_counted(tmp_path: Path) -> None:
    for i in range(7):
        name = f"defaults: [{', '.join([f'f{i + 1}'] * 10)}]\n" if i < 6 else "trainer: {}\n"
        (tmp_path / f"f{i}.yaml").write_text(name)
    [(rule, origin, why)] = refused(tmp_path / "f0.yaml")
    assert (rule, origin) == ("C003", f"{tmp_path}/f5.yaml:1")
    assert f"more than {MOST_FILES} files are included" in why


def test_files_are_included_through_a_few_others(tmp_path: Path) -> None:
    for i in range(DEEPEST + 3):
        (tmp_path / f"f{i}.yaml").write_text(f"defaults: [f{i + 1}]\n")
    [(rule, origin, why)] = refused(tmp_path / "f0.yaml")
    assert (rule, origin) == ("C003", f"{tmp_path}/f{DEEPEST}.yaml:1")
    assert f"included through more than {DEEPEST} files" in why


def test_a_list_of_files_that_are_not_there_is_not_listed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"defaults: [{', '.join(['none'] * 50_000)}]\n")
    assert len(refused(path)) <= MOST_FILES + 2


def odd_files(folder: Path) -> dict[str, Path]:
    """A path of every kind that is no file, and files that cannot be read as text."""
    os.mkfifo(folder / "pipe.yaml")
    one, other = folder / "one.yaml", folder / "other.yaml"
    one.symlink_to(other)
    other.symlink_to(one)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s.yaml"))
    (folder / "large.yaml").write_text("a: " + "x" * 9_000_000)
    (folder / "latin.yaml").write_bytes(b"trainer:\n  project_name: caf\xe9\n")
    (folder / "wide.yaml").write_bytes("trainer: {nnodes: 1}".encode("utf-16"))
    names = {"named pipe": "pipe", "link": "one", "socket": "s", "larger": "large"}
    files = {why: folder / f"{name}.yaml" for why, name in names.items()}
    files |= {"line 2 is not UTF-8": folder / "latin.yaml", "line 1 is not": folder / "wide.yaml"}
    return files | {"a directory": folder, "a device": Path("/dev/zero")}


@pytest.fixture(name="odd")
def _odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)  # a socket's name is at most 108 bytes long
    return odd_files(Path())


KINDS = [
    "named pipe",
    "link",
    "socket",
    "larger",
    "line 2 is not UTF-8",
    "line 1 is not",
    "a directory",
    "a device",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_text_is_never_waited_for(kind: str, odd: dict[str, Path]) -> None:
    path = odd[kind]
    assert not is_pipeline([path])
    [(rule, origin, why)] = refused(path)
    assert (rule, origin) == ("C003", str(path))
    assert kind in why.lower() or kind in why


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "link"])
@pytest.mark.parametrize(
    "key",
    [
        "trainer.plugins",
        "reward.custom_reward_function.path",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    ],
)
def test_nor_is_a_file_that_a_key_names(key: str, kind: str, odd: dict[str, Path]) -> None:
    words = (f"{key}={odd[kind]}", "actor_rollout_ref.rollout.multi_turn.enable=true")
    began = time.process_time()
    found = check([], words, machine=LAPTOP).problems
    assert time.process_time() - began < SECONDS
    assert any(kind in p.why for p in found if p.field == key), found


@pytest.mark.parametrize("kind", ["named pipe", "socket", "a device"])
def test_nor_are_rows(kind: str, odd: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.symlink_to(odd[kind].absolute())
    [found] = [
        p
        for p in check([], [f"data.train_files={rows}"], machine=LAPTOP).problems
        if p.field == "data.train_files"
    ]
    assert f"{rows}: cannot be read: it is" in found.why
    assert kind in found.why


NAMED_TWICE = "".join(
    f"  k{i}: '${{trainer.k{i - 1}}}${{trainer.k{i - 1}}}'\n" for i in range(1, 60)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"trainer:\n  k0: x\n{NAMED_TWICE}", "it comes to more than 1,000 references"),
        (
            "trainer:\n  plugins: [" + "'${trainer.project_name}', " * 8000 + "]\n",
            "all values together come to more than 5,000 references",
        ),
        (
            "trainer:\n"
            + "".join(f"  k{i}: '${{trainer.k{i + 1}}}'\n" for i in range(500))
            + "  k500: x\n",
            "named through more than 50 other values",
        ),
        (
            "trainer: {project_name: '${trainer.experiment_name}', "
            "experiment_name: '${trainer.project_name}'}",
            "the values name each other: trainer.experiment_name -> trainer.project_name",
        ),
        ("trainer: {project_name: '${trainer}'}", "the values name each other"),
        ("data: {train_files: [x, '${.1}']}", "the values name each other"),
        ("data: {prompt_key: '" + "${" * 9000 + "}" * 9000 + "'}", "more than 10 levels deep"),
        ("data: {prompt_key: '${oc.env:HOME}" + "x" * 200_000 + "'}", "100,000 characters"),
        ("data: {prompt_key: '${data.${trainer.stage}}'}", "made from another value"),
    ],
)
def test_references_that_come_to_too_much_are_not_resolved(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    rule, origin, said = refused(path)[0]
    assert rule == "C008"
    assert origin.startswith(f"{path}:")
    assert why in said


def test_references_inside_a_list_are_resolved_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "trainer: {project_name: p, plugins: [a, '${.0}', '${trainer.project_name}']}\n"
    )
    assert check([path], machine=LAPTOP).config.trainer.plugins == ("a", "a", "p")


def test_unknown_keys_are_not_listed_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data:\n" + "".join(f"  k{i}: {i}\n" for i in range(30_000)))
    found = refused(path)
    assert len(found) < 250
    assert any("what comes after them is not listed" in why for _, _, why in found)


def test_what_a_terminal_would_obey_is_shown_escaped() -> None:
    words = ['trainer.nnodez="\\e[2J"', "trainer.project_name=\udcff"]
    report = check([], words, machine=LAPTOP)
    text = "\n".join(report_lines(report, ["\udcff.yaml"], LAPTOP))
    assert "\\x1b[2J" in text
    assert "\\udcff.yaml" in text
    text.encode()


@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
@pytest.mark.parametrize(
    "name", ["a" * 300, "\u00e9" * 150, "a/b", "..", '"a\\0b"', '"a\\nb"', '"\\u202ex"']
)
def test_a_name_that_no_folder_can_have_is_refused(key: str, name: str) -> None:
    found = check(
        [], ["data.train_files=arithmetic://sum", f"trainer.{key}={name}"], machine=LAPTOP
    )
    errors = [(p.id, p.field) for p in found.problems if p.severity == "error"]
    assert errors == [("S15", f"trainer.{key}")]
