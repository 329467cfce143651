"""Names of training engines: those of other tools, those without an adapter, and a plugin's."""

from pathlib import Path

import pytest

from luyen.config.catalog import TRAINING_ENGINES
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.runtime.training import training_engines

STRATEGY = "actor_rollout_ref.actor.strategy"
TWO = "trainer.n_gpus_per_node=2"


def found(*words: str) -> Report:
    machine = Machine(cpus=4, ram_bytes=1 << 35)
    rows = ("data.train_files=arithmetic://sum", "actor_rollout_ref.model.path=tiny")
    return check([], (*rows, *words), machine=machine, installed=lambda name: name == "ray")


def about(report: Report) -> dict[str, str]:
    return {p.id: f"{p.why} {p.fix}" for p in report.problems if p.field == STRATEGY}


def test_check_knows_the_engines_that_are_registered():
    built_in = {n: training_engines.facts(n) for n in training_engines if n in TRAINING_ENGINES}
    assert set(built_in) == set(TRAINING_ENGINES)
    for name, facts in TRAINING_ENGINES.items():
        assert built_in[name].get("splits", False) == facts.splits


@pytest.mark.parametrize(
    ("name", "engine", "word"),
    [("fsdp", "fsdp2", "version 1"), ("deepspeed", "fsdp2", "stage 3")],
)
def test_names_of_other_tools_are_read_as_fsdp2_with_a_note(name: str, engine: str, word: str):
    report = found(TWO, f"{STRATEGY}={name}")
    assert report.plan.where.roles[0].engine == engine
    notes = about(report)
    assert [*notes] == ["F09"]
    assert word in notes["F09"]


@pytest.mark.parametrize(
    ("name", "reason", "instead"),
    [
        ("megatron", "no adapter to megatron-core", "fsdp2"),
        ("veomni", "no adapter to VeOmni", "ulysses_sequence_parallel_size"),
        ("fsdp3", "no such training engine", "fsdp2"),
    ],
)
def test_engines_without_an_adapter_are_refused_with_a_way_out(
    name: str, reason: str, instead: str
):
    errors = about(found(TWO, f"{STRATEGY}={name}"))
    assert [*errors] == ["F08"]
    assert reason in errors["F08"]
    assert instead in errors["F08"]


def test_an_engine_of_a_plugin_is_known_with_its_facts(tmp_path: Path):
    plugin = tmp_path / "engines.py"
    plugin.write_text(
        "training_engines.register('far', package='nowhere')(print)\n"
        "training_engines.register('near', splits=True)(print)\n"
        "training_engines.register('alone')(print)\n"
    )
    more = (TWO, f"trainer.plugins={plugin}")
    assert about(found(*more, f"{STRATEGY}=near")) == {}
    assert [*about(found(*more, f"{STRATEGY}=alone"))] == ["S02"]
    assert "nowhere" in about(found(*more, f"{STRATEGY}=far"))["F08"]
