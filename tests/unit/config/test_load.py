"""Files, includes, interpolation and overrides, with the line of every value."""

from pathlib import Path

import pytest

from luyen.config.loader.load import load
from luyen.config.loader.yaml_tree import read_tree


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3E5", 3e5),
        (".5", 0.5),
        ("12", 12),
        ("0.5_2.0", "0.5_2.0"),
        ("1_3", "1_3"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("[1, 2e-3]", [1, 2e-3]),
        ("'1'", "1"),
        ("1:30", "1:30"),
        ("2026-02-30", "2026-02-30"),
        ("---", "---"),
    ],
)
def test_scalars_mean_what_users_expect(text: str, value: object) -> None:
    found = load([], [f"a.b={text}"]).values["a"]["b"]
    assert found == value
    assert type(found) is type(value)


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "# comment\ntrainer:\n  nnodes: 2\n\n  save_freq: 5\n")
    tree = load([path], [])
    assert str(tree.origins["trainer.nnodes"]) == f"{path}:3"
    assert str(tree.origins["trainer.save_freq"]) == f"{path}:5"


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "trainer: {nnodes: 1, save_freq: 1, test_freq: 1}\n")
    two = write(tmp_path, "two.yaml", "trainer: {save_freq: 2, test_freq: 2}\n")
    tree = load([one, two], ["trainer.test_freq=3"])
    assert tree.values["trainer"] == {"nnodes": 1, "save_freq": 2, "test_freq": 3}
    assert str(tree.origins["trainer.test_freq"]) == "command line"
    assert str(tree.origins["trainer.save_freq"]) == f"{two}:1"


def test_includes_come_first_and_self_marks_the_place(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "trainer: {nnodes: 4, save_freq: 4}\n")
    above = write(tmp_path, "above.yaml", "defaults: [base]\ntrainer: {nnodes: 2}\n")
    below = write(tmp_path, "below.yaml", "defaults: [_self_, base]\ntrainer: {nnodes: 2}\n")
    assert load([above], []).values["trainer"] == {"nnodes": 2, "save_freq": 4}
    assert load([below], []).values["trainer"] == {"nnodes": 4, "save_freq": 4}


def test_files_that_include_each_other_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "defaults: [two]\n")
    write(tmp_path, "two.yaml", "defaults: [one]\n")
    problems = load([one], []).problems
    assert [p.id for p in problems] == ["C003"]
    assert "include each other" in problems[0].why


def test_hydra_groups_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n")
    problems = load([path], []).problems
    assert [(p.id, str(p.origin)) for p in problems] == [("C003", f"{path}:1")]


def test_a_missing_file_is_a_problem_not_a_traceback(tmp_path: Path) -> None:
    problems = load([tmp_path / "none.yaml"], []).problems
    assert [p.id for p in problems] == ["C003"]


def test_a_key_written_twice_is_refused() -> None:
    tree = read_tree("trainer:\n  nnodes: 1\n  nnodes: 2\n", "a.yaml")
    assert [(p.id, p.field, str(p.origin)) for p in tree.problems] == [
        ("C002", "trainer.nnodes", "a.yaml:3")
    ]


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t- x", "- 1\n- 2\n", "'"])
def test_broken_yaml_is_refused_with_its_line(text: str) -> None:
    tree = read_tree(text, "a.yaml")
    assert [p.id for p in tree.problems] == ["C001"]
    assert tree.problems[0].origin.line is not None


@pytest.mark.parametrize("text", ["trainer.nnodes", "=3", "~trainer.nnodes=3", "trainer.nnodes=[1"])
def test_overrides_of_another_form_are_refused(text: str) -> None:
    assert [p.id for p in load([], [text]).problems] == ["C011"]


def test_hydra_plus_prefix_means_the_same() -> None:
    for prefix in ("", "+", "++"):
        assert load([], [f"{prefix}trainer.nnodes=3"]).values == {"trainer": {"nnodes": 3}}


def test_a_mapping_override_counts_as_writing_its_keys() -> None:
    tree = load([], ["actor_rollout_ref.actor.optim={lr: 1e-4}"])
    assert "actor_rollout_ref.actor.optim.lr" in tree.origins


def test_interpolation_reads_keys_defaults_and_resolvers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUYEN_TEST_DIR", "/somewhere")
    path = write(
        tmp_path,
        "a.yaml",
        "data:\n"
        "  max_prompt_length: 64\n"
        "  max_response_length: ${data.max_prompt_length}\n"
        "  train_batch_size: ${reward.memory_mb}\n"
        "  train_files: ['${oc.env:LUYEN_TEST_DIR}/a.parquet']\n"
        "trainer:\n  nnodes: ${oc.select:nothing.here,2}\n",
    )
    tree = load([path], [])
    assert tree.problems == ()
    assert tree.values["data"]["max_response_length"] == 64
    assert tree.values["data"]["train_batch_size"] == 4096
    assert tree.values["data"]["train_files"] == ["/somewhere/a.parquet"]
    assert tree.values["trainer"]["nnodes"] == 2


@pytest.mark.parametrize(
    "text", ["${no.such.key}", "${", "${oc.env:LUYEN_NOT_SET}", "${no_resolver:1}"]
)
def test_what_cannot_be_resolved_is_refused_by_name(text: str, tmp_path: Path) -> None:
    body = f"trainer:\n  project_name: '{text}'\n  nnodes: ${{oc.select:x,3}}\n"
    tree = load([write(tmp_path, "a.yaml", body)], [])
    assert [(p.id, p.field) for p in tree.problems] == [("C008", "trainer.project_name")]
    assert tree.values["trainer"] == {"nnodes": 3}


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("data: &a\n  sampler: *a\n", 2, "an alias is inside the block that it names"),
        ("a: " + "[" * 100_000 + "\n", 1, "nested more than 100 levels deep"),
        ("a: " + "{a: " * 1500 + "1" + "}" * 1500 + "\n", 1, "nested more than 100 levels deep"),
        ("data: \x07\n", 1, "control characters are not allowed"),
        ("data:\n  train_batch_size: !!int abc\n", 2, "the value does not fit its tag"),
        ("data:\n  return_raw_chat: !!bool maybe\n", 2, "the value does not fit its tag"),
        ("data:\n  prompt_key: !!timestamp abc\n", 2, "the value does not fit its tag"),
    ],
)
def test_text_that_no_yaml_reader_survives_is_a_problem_with_a_line(
    text: str, line: int, why: str
) -> None:
    tree = read_tree(text, "a.yaml")
    assert [(p.id, str(p.origin)) for p in tree.problems] == [("C001", f"a.yaml:{line}")]
    assert why in tree.problems[0].why


def test_an_own_key_over_a_merged_one_is_no_repetition() -> None:
    text = "a: &base {lr: 1, n: 2}\nb: &again\n  <<: *base\n  lr: 3\nc: *again\nd:\n  <<: *again\n"
    tree = read_tree(text, "a.yaml")
    assert tree.problems == ()
    assert tree.values["b"] == tree.values["c"] == tree.values["d"] == {"lr": 3, "n": 2}
    assert str(tree.origins["b.lr"]) == "a.yaml:4"


def test_a_key_with_a_dot_or_without_a_name_is_refused_where_it_stands() -> None:
    tree = read_tree('data.train_files: x\ndata: {"": 1}\ntrainer: {nnodes: 2}\n', "a.yaml")
    found = [(p.id, p.field, str(p.origin)) for p in tree.problems]
    assert found == [("C005", "data.train_files", "a.yaml:1"), ("C005", "data.", "a.yaml:2")]
    assert tree.values == {"data": {}, "trainer": {"nnodes": 2}}


def test_an_empty_block_takes_nothing_back(tmp_path: Path) -> None:
    one = write(tmp_path, "one.yaml", "data: {train_files: a.parquet}\n")
    two = write(tmp_path, "two.yaml", "data:\n#  train_files: b.parquet\n")
    assert load([one, two], []).values == {"data": {"train_files": "a.parquet"}}


@pytest.mark.parametrize(
    "text", [".data=1", "data..x=1", "data.=1", "=1", "~data.x=1", ".".join(["a"] * 2000) + "=1"]
)
def test_an_override_whose_key_has_an_empty_name_is_refused(text: str) -> None:
    assert [p.id for p in load([], [text]).problems] == ["C011"]


def test_an_override_holds_one_value() -> None:
    tree = load([], ["trainer.project_name=a\nnnodes: 3"])
    assert [(p.id, p.field) for p in tree.problems] == [("C011", "trainer.project_name")]
    assert tree.values == {}


def test_an_include_that_no_file_can_be_called_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", f"defaults: [{'a' * 300}]\n")
    assert [p.id for p in load([path], []).problems] == ["C003"]


def test_values_omegaconf_cannot_hold_do_not_stop_interpolation() -> None:
    body = "{s: [!!set {a}], n: '${data.max_prompt_length}'}"
    tree = load([], [f"actor_rollout_ref.model.override_config={body}"])
    assert tree.problems == ()
    assert tree.values["actor_rollout_ref"]["model"]["override_config"] == {"s": [{"a"}], "n": 512}
