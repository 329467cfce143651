"""Every public configuration of the corpus migrates, passes `check`, and keeps its numbers."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.migrate.migrate import ABSENT, WITHOUT_EFFECT, migrate
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Migration, table_lines, yaml_text
from tests.unit.config.migration_corpus import FOLDER, TOOLS, Case, cases

CORPUS = [case for tool in TOOLS for case in cases(tool)]
HELD_OUT = [case for tool in TOOLS for case in cases(tool, held_out=True)]
EVERY = [*CORPUS, *HELD_OUT]
PAGE = (FOLDER.parents[2] / "docs" / "migrate.md").read_text()
TITLES = {"verl": "verl", "trl": "TRL", "llama_factory": "LLaMA-Factory", "axolotl": "Axolotl"}
GIB = 1024**3
CLUSTER = Machine(cpus=8, ram_bytes=512 * GIB, gpu_bytes=(80 * GIB,) * 8)
ADVICE = {
    "A09": "samples of a prompt that the estimator does not compare",
    "D20": "prompts that are too long end the run, as they did",
    "B11": "groups that do not fit a micro-batch",
    "M04": "a low learning rate for an adapter",
    "O07": "top-p below 1, as it was",
    "R20": "generation in several waves",
    "F04": "shards on one device, where the script is told elsewhere how many there are",
}
"""Findings that are true of the configuration as it was: advice, no error and no dead key."""
ROWLESS = (
    "eliashossain001/efficient-gemma3-finetuning",
    "eliashossain001/Gemma3N-4B-Multimodal",
    "huggingface/trl examples/scripts/dpo/dpo_tldr.py",
    "kingjameschan/gemma-math-sft-grpo gcp/train_dpo_l4.py",
    "liushz/cogrpo_verl scripts/run_multinodes_grpo.sh",
)
"""Cases whose rows come from code or arguments: `data.train_files` is left to the user."""
NAMES = {
    "llama_factory": {"lora_rank": "r", "cutoff_len": "length", "model_name_or_path": "model"},
    "axolotl": {"lora_r": "r", "sequence_len": "length", "base_model": "model"},
    "trl": {"lora_r": "r", "max_length": "length", "model_name_or_path": "model"},
}


def name_of(case: Case) -> str:
    return case.source


@cache
def result(index: int, folder: Path) -> tuple[Migration, Report]:
    """The migration of a case and what `check` says of the file that is written."""
    case = EVERY[index]
    path = folder / str(index)
    path.mkdir()
    source = case.write(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        migration = migrate(MigrationRequest(text=source, installed=lambda _: False))
        (path / "luyen.yaml").write_text(yaml_text(migration))
        report = check([Path("luyen.yaml")], machine=CLUSTER, starts_a_run=False)
    return migration, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys of nested values, list entries by number."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{name}.")
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                found |= flat(one, f"{above}{name}[{number}].")
        else:
            found[f"{above}{name}"] = value
    return found


def written_keys(case: Case) -> set[str]:
    """Names of the keys that a case gives a value to; of a Python file, those of its calls."""
    facts = case.facts
    if "values" in facts:
        return set(flat(facts["values"]))
    words = facts.get("overrides", [])
    if case.tool == "verl":
        named = {word.lstrip("+").partition("=")[0] for word in words}
        for values in facts.get("files", {}).values():
            named |= {k for k in flat(values) if k.partition(".")[0] not in ("hydra", "defaults")}
        return named
    if words:
        return {word[2:].replace("=", " ").split()[0] for word in words}
    calls = [w for name, words in facts["calls"].items() if "Config" in name for w in words]
    return {word.partition("=")[0].split(".")[0] for word in calls}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_corpus_has_a_dozen_of_each_tool_and_a_tenth_held_out(tool: str):
    known, unknown = cases(tool), cases(tool, held_out=True)
    assert len(known) >= 12
    assert len(unknown) >= 2
    sources = [case.source for case in [*known, *unknown]]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("index", range(len(EVERY)), ids=[name_of(case) for case in EVERY])
def test_every_key_is_in_exactly_one_column(index: int, folder: Path):
    migration, _ = result(index, folder)
    told = [entry for entry in migration.entries if not entry.is_default]
    names = Counter(entry.source for entry in told)
    assert [name for name, count in names.items() if count > 1] == []
    found = {name.split(".")[0] if EVERY[index].tool == "trl" else name for name in names}
    wanted = written_keys(EVERY[index])
    wanted = {name.split(".")[0] for name in wanted} if EVERY[index].tool == "trl" else wanted
    assert wanted <= found
    for entry in told:
        assert entry.outcome.keys or entry.outcome.note, entry
    lines = "\n".join(table_lines(migration))
    assert all(f"  {entry.source} = " in lines for entry in told)


@pytest.mark.parametrize("index", range(len(EVERY)), ids=[name_of(case) for case in EVERY])
def test_the_new_file_passes_check(index: int, folder: Path):
    _, report = result(index, folder)
    left = {p.id for p in report.problems if p.id not in (*ABSENT, *ADVICE)}
    assert left == set()
    is_rowless = any(problem.id == "D01" for problem in report.problems)
    assert is_rowless == EVERY[index].source.startswith(ROWLESS)
    for problem in report.problems:
        assert problem.id not in WITHOUT_EFFECT
        if problem.id == "D02":
            assert "no such file" in problem.why
        if problem.id == "M01":
            assert "no such directory" in problem.why


@pytest.mark.parametrize("index", range(len(EVERY)), ids=[name_of(case) for case in EVERY])
def test_every_line_of_the_new_file_names_its_source(index: int, folder: Path):
    migration, _ = result(index, folder)
    text = yaml_text(migration)
    assert yaml.safe_load(text) is not None
    lines = [line for line in text.splitlines() if ": " in line and not line.startswith("#")]
    assert len(lines) == len(migration.keys)
    sources = {entry.source for entry in migration.entries}
    for line in lines:
        origin = line.rpartition("  # ")[2].partition("'s own: ")
        names = (origin[2] or origin[0]).split(", ")
        assert set(names) <= sources, line


# Numbers, by arithmetic of the test's own.


def numbers(case: Case) -> dict[str, Any]:
    """Facts of a YAML file of TRL, LLaMA-Factory or Axolotl under common names."""
    values = flat(case.facts["values"])
    values |= {key.removeprefix("trl."): value for key, value in values.items() if "trl." in key}
    each = values.get("per_device_train_batch_size", values.get("micro_batch_size"))
    each = each or {"axolotl": 1}.get(case.tool, 8)
    names = NAMES[case.tool]
    found = {new: values.get(old) for old, new in names.items()}
    epochs = values.get("num_train_epochs", values.get("num_epochs"))
    return {
        **found,
        "rows": each * values.get("gradient_accumulation_steps", 1),
        "devices": values.get("num_processes", 1),
        "group": values.get("num_generations"),
        "generated": values.get("generation_batch_size", 0),
        "epochs": epochs or {"axolotl": 1}.get(case.tool, 3),
        "steps": values.get("max_steps", -1),
        "lr": values.get("learning_rate"),
        "alpha": values.get("lora_alpha"),
        "ratio": values.get("warmup_ratio"),
        "decay": values.get("weight_decay", 0.0),
        "seed": values.get("seed", 42),
        "is_adapter": values.get("use_peft")
        or values.get("adapter")
        or (case.tool == "llama_factory" and values.get("finetuning_type") == "lora"),
    }


FLAT = [i for i, case in enumerate(EVERY) if case.tool != "verl" and "values" in case.facts]


@pytest.mark.parametrize("index", FLAT, ids=[name_of(EVERY[i]) for i in FLAT])
def test_batches_steps_and_rates_keep_their_meaning(index: int, folder: Path):
    config, facts = result(index, folder)[1].config, numbers(EVERY[index])
    rows, devices = facts["rows"], facts["devices"]
    samples = config.actor_rollout_ref.rollout.n if config.trainer.stage == "rl" else 1
    if config.trainer.stage == "rl" and config.algorithm.adv_estimator != "gae":
        assert samples == (facts["group"] or 8)
    assert config.data.train_batch_size * samples == max(rows * devices, facts["generated"])
    if config.trainer.stage == "rl":
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        assert mini * samples == rows * devices
    if facts["steps"] > 0:
        assert config.trainer.total_training_steps == facts["steps"]
    else:
        assert config.trainer.total_training_steps is None
        assert config.trainer.total_epochs == facts["epochs"]
    optim = config.actor_rollout_ref.actor.optim
    if facts["lr"] is not None:
        assert optim.lr == float(facts["lr"])
    assert optim.weight_decay == facts["decay"]
    assert config.trainer.seed == facts["seed"]
    if facts["ratio"] is not None:
        assert optim.lr_warmup_steps_ratio == facts["ratio"]
        assert optim.lr_warmup_steps == -1


@pytest.mark.parametrize("index", FLAT, ids=[name_of(EVERY[i]) for i in FLAT])
def test_adapters_and_lengths_keep_their_meaning(index: int, folder: Path):
    config, facts = result(index, folder)[1].config, numbers(EVERY[index])
    model = config.actor_rollout_ref.model
    assert model.path == facts["model"] or EVERY[index].facts["values"].get("model_name")
    if facts["is_adapter"]:
        rank = facts["r"] or 8
        alpha = facts["alpha"] or {"llama_factory": 2 * rank}.get(EVERY[index].tool, 16)
        assert model.lora_alpha / model.lora_rank == pytest.approx(alpha / rank)
    else:
        assert model.lora_rank == 0
    if facts["length"] is not None and config.trainer.stage != "rl":
        longest = config.data.max_prompt_length + config.data.max_response_length
        assert longest == facts["length"]
        assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest


VERL = [i for i, case in enumerate(EVERY) if case.tool == "verl" and "sft" not in case.source]
KEPT = {
    "data.train_batch_size": lambda c: c.data.train_batch_size,
    "data.max_response_length": lambda c: c.data.max_response_length,
    "actor_rollout_ref.actor.ppo_mini_batch_size": lambda c: (
        c.actor_rollout_ref.actor.ppo_mini_batch_size
    ),
    "actor_rollout_ref.rollout.n": lambda c: c.actor_rollout_ref.rollout.n,
    "actor_rollout_ref.actor.optim.lr": lambda c: c.actor_rollout_ref.actor.optim.lr,
    "trainer.total_epochs": lambda c: c.trainer.total_epochs,
    "trainer.n_gpus_per_node": lambda c: c.trainer.n_gpus_per_node,
    "algorithm.adv_estimator": lambda c: c.algorithm.adv_estimator,
}
"""Key of verl -> where the same number is here."""


@pytest.mark.parametrize("index", VERL, ids=[name_of(EVERY[i]) for i in VERL])
def test_numbers_of_verl_are_carried_over(index: int, folder: Path):
    case, config = EVERY[index], result(index, folder)[1].config
    words = dict(word.lstrip("+").partition("=")[::2] for word in case.facts["overrides"])
    for key, value_of in KEPT.items():
        plain = words.get(key, "").strip("\"'")
        is_number = plain.replace(".", "").replace("e-", "").isdigit()
        is_overruled = key.endswith("epochs") and "trainer.total_training_steps" in words
        if not plain or "$" in plain or is_overruled:
            continue
        assert value_of(config) == (float(plain) if is_number else plain), key
    if config.trainer.total_training_steps is None and "trainer.total_epochs" not in words:
        assert config.trainer.total_epochs == 30


@pytest.mark.parametrize("tool", TOOLS)
def test_the_page_counts_configurations_and_keys(tool: str, folder: Path):
    told = [
        entry.column
        for index, case in enumerate(EVERY)
        if case.tool == tool
        for entry in result(index, folder)[0].entries
        if not entry.is_default
    ]
    count = Counter(told)
    numbers = [len(cases(tool)), len(cases(tool, held_out=True)), len(told)]
    numbers += [count[column] for column in ("carried", "renamed", "implied", "unavailable")]
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {TITLES[tool]} |")]
    assert rows == [f"| {TITLES[tool]} | {' | '.join(map(str, numbers))} |"]
