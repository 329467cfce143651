"""Names of training engines: those of other tools, those without an adapter, and a plugin's."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.config.catalog import TRAINING_ENGINES
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.megatron_models import why_not
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
        ("megatron", "needs the package megatron", "luyen[megatron]"),
        ("veomni", "no adapter to VeOmni", "ulysses_sequence_parallel_size"),
        ("veomni", "datasets below 2.22", "fsdp2"),
        ("fsdp3", "no such training engine", "fsdp2"),
    ],
)
def test_engines_that_are_not_here_are_refused_with_a_way_out(name: str, reason: str, instead: str):
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


LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({**LLAMA, "attention_bias": True}, "biases"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation gelu"),
        ({**LLAMA, "attention_dropout": 0.1}, "dropout"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 8}, "sliding window"),
        ({**LLAMA, "model_type": "mistral"}, "sliding window"),
        ({**LLAMA, "num_key_value_heads": 2}, "num_key_value_heads is 2, which 4"),
    ],
)
def test_models_that_megatron_would_compute_otherwise_are_refused(raw: dict[str, Any], reason: str):
    found = why_not(raw, 4)
    assert found is not None
    assert reason in found[0]


def test_windows_that_are_switched_off_are_no_reason():
    raw = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}
    assert why_not(raw, 4) is None
    assert why_not({**LLAMA, "model_type": "mistral", "sliding_window": None}, 4) is None


MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "intermediate_size": 98,
    "vocab_size": 64,
}


def test_experts_are_divided_whole_and_dense_layers_by_their_width():
    assert why_not(MIXTURE, 4) is None
    dense = {**MIXTURE, "mlp_only_layers": [0]}
    for raw, sizes, why in (
        (dense, {}, "intermediate_size is 98, which 4"),
        (MIXTURE, {"expert_size": 2}, "num_experts is 12, which 8"),
        (
            {**MIXTURE, "model_type": "mixtral", "num_local_experts": 6},
            {},
            "num_local_experts is 6",
        ),
        (
            {**MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 6},
            {},
            "shared_expert_intermediate_size is 6",
        ),
        ({**MIXTURE, "model_type": "mixtral", "sliding_window": 8}, {}, "a sliding window"),
    ):
        reason = why_not(raw, 4, **sizes)
        assert reason is not None
        assert why in reason[0]
    # Masters are divided over all devices, and are those of experts that a device computes with.
    assert why_not(MIXTURE, 2, expert_size=2, copies=3) is None
    assert why_not(MIXTURE, 2, expert_size=2, copies=2) is not None
    assert why_not(MIXTURE, 4, copies=2) is None


EXPERTS = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size"


def test_experts_are_divided_by_megatron_over_equal_groups(tmp_path: Path):
    def problems(*words: str, **changes: Any) -> list[tuple[str, str]]:
        (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, **changes}))
        report = found(f"actor_rollout_ref.model.path={tmp_path}", *words)
        return [(p.id, p.why) for p in report.problems if p.id in ("F17", "F18")]

    two, four = f"{EXPERTS}=2", "trainer.n_gpus_per_node=4"
    chosen = f"{STRATEGY}=megatron"
    assert problems(four, two, chosen) == []
    assert problems(four, chosen, f"{EXPERTS}=4") == []
    [(name, why)] = problems(four, two)
    assert name == "F18"
    assert "only megatron" in why
    [(name, why)] = problems(four, chosen, f"{EXPERTS}=3")
    assert (name, why) == ("F18", "4 devices train, 1 of them divide each layer")
    assert problems(four, chosen, two, num_experts=6) == [
        ("F17", "the model's num_experts is 6, which 4 devices cannot divide")
    ]
    assert problems(four, chosen, two, model_type="llama") == [
        ("F18", "a llama model has no experts that are divided")
    ]


def test_the_plan_counts_the_experts_of_a_device_alone(tmp_path: Path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 256}
    (tmp_path / "config.json").write_text(
        json.dumps({**MIXTURE, **sizes, "head_dim": 8, "num_experts_per_tok": 2})
    )

    def gathered(*words: str) -> int:
        report = found(
            f"actor_rollout_ref.model.path={tmp_path}", TWO, f"{STRATEGY}=megatron", *words
        )
        assert report.plan.memory is not None
        return max(phase.parts.get("gathered", 0) for phase in report.plan.memory.phases)

    # fp32 weights and gradients of half of 12 experts in 2 layers, of policy and critic.
    assert gathered() - gathered(f"{EXPERTS}=2") == 2 * 2 * 6 * 3 * 64 * 256 * (4 + 4)


def test_the_plan_counts_what_megatron_computes_with_beside_the_masters():
    def gathered(name: str) -> int:
        plan = found(TWO, "actor_rollout_ref.model.path=builtin://arithmetic", f"{STRATEGY}={name}")
        assert plan.plan.memory is not None
        return max(phase.parts.get("gathered", 0) for phase in plan.plan.memory.phases)

    assert gathered("megatron") > gathered("fsdp2") > 0
