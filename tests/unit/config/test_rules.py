"""Every rule has a configuration that triggers it and one that does not."""

from pathlib import Path

import pytest
import yaml

from luyen.base.rundir import RunDirectory
from luyen.config.check import check, no_row_is_read
from luyen.config.loader.parse import stored_values
from luyen.config.machine import Machine
from luyen.config.problem import Problem
from luyen.config.rules.all import RULES
from luyen.data.first_rows import first_row_error
from tests.unit.config.rule_cases import CASES

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3, has_bf16=False)
ROWS = "data.train_files=arithmetic://sum"


def config_of(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


FILES = {
    "tools.yaml": "tools:\n  - builtin: calculator\n",
    "broken.yaml": "tools:\n  - bulitin: calculator\n",
    "plugin.py": "class MySampler: ...\n\n\ndef score(**row): ...\n",
    "object.py": "object_of_another_process('score', 'a lock')\n\n\ndef score(**row): ...\n",
    "engines.py": "rollout_engines.register('far', package='nowhere')(print)\n"
    "rollout_engines.register('near', splits=True)(print)\n",
    "programs.yaml": "tools:\n  - builtin: python\n",
    "rows.jsonl": '{"prompt": []}\n',
    "plain.jsonl": '{"prompt": "1+1="}\n',
    "asked.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}]}\n',
    "users.yaml": "interaction: [{class_name: package.Class}]\n",
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    empty = tmp_path / "empty"
    empty.mkdir()
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    (deaf / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    saved = tmp_path / "saved"
    for step in (9, 10):
        (saved / "luyen" / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    begun = tmp_path / "begun"
    began = stored_values(check([], [ROWS]).config)
    text = yaml.safe_dump(began)
    made = RunDirectory.create(begun / "luyen" / "run", config=text, provenance={}, manifest={})
    made.metrics.write_text("a step\n")
    named = {
        "BEGUN": begun,
        "ROWS": tmp_path / "rows.jsonl",
        "PLAIN": tmp_path / "plain.jsonl",
        "ASKED": tmp_path / "asked.jsonl",
        "USERS": tmp_path / "users.yaml",
        "TOOLS": tmp_path / "tools.yaml",
        "BROKEN": tmp_path / "broken.yaml",
        "PLUGIN": tmp_path / "plugin.py",
        "OBJECT": tmp_path / "object.py",
        "ENGINES": tmp_path / "engines.py",
        "HERE": empty,
        "SAVED": saved,
        "PROGRAMS": tmp_path / "programs.yaml",
        "DEAF": deaf,
        "FALCON": config_of(tmp_path / "falcon", '{"model_type": "falcon", "vocab_size": 8}'),
        "MIXTRAL": config_of(tmp_path / "mixtral", '{"model_type": "mixtral", "vocab_size": 8}'),
        "MIXTURE": config_of(tmp_path / "experts", '{"model_type": "mixtral", "num_experts": 8}'),
        "GPT2": config_of(tmp_path / "gpt2", '{"model_type": "gpt2", "n_positions": 1023}'),
    }
    return {word: str(path) for word, path in named.items()}


def problems(overrides: tuple[str, ...], places: dict[str, str]) -> list[Problem]:
    words = [ROWS, *overrides]
    for word, path in places.items():
        words = [text.replace(f"={word}", f"={path}") for text in words]
    version = (2, 10) if "OLD" in words else (5, 19)
    report = check(
        [],
        [word for word in words if word not in ("OLD", "BARE", "READ")],
        machine=LAPTOP,
        installed=lambda package: False,
        versions=lambda package: version if package == "transformers" else (2, 13),
        missing_promises=lambda: ("files", "memory") if "BARE" in words else (),
        row_error=first_row_error if "READ" in words else no_row_is_read,
    )
    return list(report.problems)


def test_the_table_covers_every_rule() -> None:
    assert set(CASES) == set(RULES)


def test_there_are_at_least_thirty_rules() -> None:
    assert len(RULES) >= 30


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_is_triggered(name: str, places: dict[str, str]) -> None:
    found = [p for p in problems(CASES[name][0], places) if p.id == name]
    assert found, f"{name} did not trigger"
    for problem in found:
        assert problem.severity == RULES[name].severity
        assert problem.why
        assert problem.fix


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_stays_quiet(name: str, places: dict[str, str]) -> None:
    assert name not in {p.id for p in problems(CASES[name][1], places)}


def test_resuming_names_the_newest_checkpoint_by_number(places: dict[str, str]) -> None:
    found = [p for p in problems(CASES["S08"][0], places) if p.id == "S08"]
    assert "step_10" in found[0].why


def test_divisibility_shows_its_arithmetic(places: dict[str, str]) -> None:
    words = ("data.train_batch_size=300", "actor_rollout_ref.actor.ppo_mini_batch_size=256")
    found = [p for p in problems(words, places) if p.id == "B02"]
    assert "300 prompts = 1 x 256 + 44" in found[0].why


def test_a_pass_holds_a_whole_conversation(places: dict[str, str]) -> None:
    wide, talks = "actor_rollout_ref.rollout.max_num_batched_tokens=", "multi_turn.enable=true"
    talks = f"actor_rollout_ref.rollout.{talks}"
    assert not [p for p in problems((f"{wide}1000",), places) if p.id == "R10"]
    [found] = [p for p in problems((f"{wide}1000", talks), places) if p.id == "R10"]
    assert "all that was said" in found.why
    assert not [p for p in problems((f"{wide}1023", talks), places) if p.id == "R10"]


def test_a_limit_of_all_rows_beside_weights_of_files_is_refused(places: dict[str, str]) -> None:
    """It keeps the first rows of all files together, so that the second file could have none."""
    sums, products = "arithmetic://sum?size=12", "arithmetic://product?digits=1&size=9"
    mixture = (f"data.train_files=['{sums}', '{products}']", "data.train_weights=[3, 1]")
    found = {p.id: p.field for p in problems((*mixture, "data.train_max_samples=2"), places)}
    assert found["D18"] == "data.train_max_samples"
    for words in (mixture, (*mixture, "data.train_file_samples=[2, 2]")):
        assert "D18" not in {p.id for p in problems(words, places)}


NF4 = ("actor_rollout_ref.model.quantization=nf4", "actor_rollout_ref.model.lora_rank=4")
SENT = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.server.transport=folder")


@pytest.mark.parametrize(
    ("form", "urls", "is_refused"),
    [
        ("adapter", "[http://a:1]", True),
        ("merged", "[http://a:1]", False),
        ("adapter", "[]", False),
    ],
)
def test_an_adapter_of_4_bit_weights_goes_to_servers_of_the_run_alone(
    places: dict[str, str], form: str, urls: str, is_refused: bool
) -> None:
    server = (f"actor_rollout_ref.rollout.server.lora_format={form}",)
    words = (*NF4, *SENT, *server, f"actor_rollout_ref.rollout.server_urls={urls}")
    assert any(p.id == "M19" for p in problems(words, places)) is is_refused


def test_an_adapter_that_is_loaded_has_no_beginning_of_its_own(places: dict[str, str]) -> None:
    words = (NF4[1], "actor_rollout_ref.model.lora_init=gaussian")
    loaded = "actor_rollout_ref.model.lora_adapter_path=some/folder"
    assert not any(p.id == "M03" for p in problems(words, places))
    assert any(p.id == "M03" for p in problems((*words, loaded), places))


@pytest.mark.parametrize(
    ("routes", "is_refused"),
    [
        ("{'*': [code]}", True),
        ("{'arithmetic/*': [exact], '*': [code]}", False),
        ("{'other/*': [code]}", False),
    ],
)
def test_a_rule_of_a_route_that_rows_take_can_read_them(
    routes: str, is_refused: bool, places: dict[str, str]
) -> None:
    """A number as ground truth holds no tests: every score would be a fault."""
    found = {p.field for p in problems((f"reward.routes={routes}",), places) if p.id == "W18"}
    assert found == ({"reward.routes"} if is_refused else set())
    component = problems(("reward.components={a: {rule: code}}",), places)
    assert "reward.components" in {p.field for p in component if p.id == "W18"}
