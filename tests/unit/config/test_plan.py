"""The plan's arithmetic against numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.model_folder.config_json import ModelShape, read_shape, shape_from
from luyen.config.optimizer_memory import whole_tensors
from luyen.config.schema.model import ModelConfig

GIB = 1024**3
LAPTOP = Machine(cpus=2, ram_bytes=16 * GIB)
H200 = Machine(cpus=16, ram_bytes=128 * GIB, gpu_bytes=(139 * GIB,))
SMOLLM = ModelShape(
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    is_tied=True,
)


def plan_of(*overrides: str, machine: Machine = LAPTOP):
    return check([], ["data.train_files=arithmetic://sum", *overrides], machine=machine).plan


def test_prompts_become_rollouts_mini_batches_and_optimizer_steps() -> None:
    batch = plan_of(
        "data.train_batch_size=96",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=24",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.n_gpus_per_node=8",
    ).batch
    assert batch.rollouts == 96 * 4
    assert batch.mini_batches == 4
    assert batch.mini_batch_rollouts == 24 * 4
    assert batch.device_rollouts == 24 * 4 // 8
    assert batch.optimizer_steps == 4 * 2
    assert batch.tokens == 96 * 4 * 1024


@pytest.mark.parametrize(("kind", "sequences"), [("unpaired", 1), ("pair", 2)])
def test_rows_of_a_plugins_loss_are_counted_as_it_says(tmp_path: Path, kind: str, sequences: int):
    plugin = tmp_path / "mine.py"
    plugin.write_text(f"""
from luyen.algorithms.preference.inputs import preference_losses
@preference_losses.register("mine", kind="{kind}")
def mine(inputs): ...
""")
    batch = plan_of(
        "trainer.stage=preference",
        "preference.loss_type=[mine]",
        f"trainer.plugins=[{plugin}]",
        "data.train_batch_size=96",
    ).batch
    assert (batch.samples_per_prompt, batch.rollouts) == (sequences, 96 * sequences)


def test_micro_batches_count_whole_sequences_under_the_token_budget() -> None:
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=256"
    batch = plan_of(mini, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000").batch
    assert batch.micro_batches == -(-256 // 3)
    assert batch.micro_batch_tokens == 4000
    counted = plan_of(
        mini,
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    ).batch
    assert (counted.micro_batches, counted.micro_batch_tokens) == (16, 16 * 1024)


def test_smollm2_has_135_million_parameters() -> None:
    # 30 x (576 x 960 + 576 x 576 + 3 x 576 x 1536 + 1152) + 49152 x 576 + 576
    assert SMOLLM.parameters() == 134_515_008


def test_the_built_in_model_has_a_shape() -> None:
    shape = read_shape(ModelConfig())
    assert shape is not None
    assert shape.parameters() == 1_000_832


def test_a_shape_is_read_from_a_directory_and_overridden(tmp_path: Path) -> None:
    raw = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = read_shape(ModelConfig(path=str(tmp_path), override_config={"num_hidden_layers": 3}))
    assert shape is not None
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.intermediate) == (3, 2, 4, 32)
    assert shape_from({"n_layer": 2}) is None


def test_bf16_training_holds_masters_and_fp32_does_not(tmp_path: Path) -> None:
    raw = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    words = (f"actor_rollout_ref.model.path={tmp_path}", "algorithm.adv_estimator=reinforce")
    gpu = plan_of(*words, machine=H200).memory
    cpu = plan_of(*words, machine=LAPTOP).memory
    assert gpu is not None
    assert cpu is not None
    update = {phase.name: phase.parts for phase in gpu.phases}["update"]
    assert update["weights"] == 134_515_008 * 2
    assert update["gradients"] == 134_515_008 * 4
    assert update["optimizer"] == 134_515_008 * 12
    on_cpu = {phase.name: phase.parts for phase in cpu.phases}["update"]
    assert on_cpu["weights"] == 134_515_008 * 4
    assert on_cpu["optimizer"] == 134_515_008 * 8
    generate = {phase.name: phase.parts for phase in gpu.phases}["generate"]
    # 256 sequences at once, each with 8 full pages of its prompt, 8 of its answer and one to copy:
    # 17 pages x 64 tokens x 2 x 30 layers x 192 x 2 bytes
    assert generate["kv cache"] == 256 * 17 * 64 * 2 * 30 * 192 * 2


SAVING = {
    "enable_gradient_checkpointing": "true",
    "enable_activation_offload": "true",
    "tiled_mlp.enabled": "true",
    "lora_rank": "8",
}


@pytest.mark.parametrize("name", SAVING)
def test_what_saves_memory_lowers_the_peak_of_the_update(name: str) -> None:
    large = "{num_hidden_layers: 24, hidden_size: 1024, intermediate_size: 4096}"
    words = [
        f"actor_rollout_ref.model.override_config={large}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    ]
    plain = plan_of(*words, machine=H200).memory
    saving = plan_of(*words, f"actor_rollout_ref.model.{name}={SAVING[name]}", machine=H200).memory
    assert plain is not None
    assert saving is not None
    assert saving.phases[2].total < 0.9 * plain.phases[2].total


def test_on_a_cpu_offloading_saves_nothing_and_fused_kernels_save_logits() -> None:
    words = [
        "actor_rollout_ref.model.override_config={vocab_size: 150000, tie_word_embeddings: false}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    ]
    plain, offloaded, fused = (
        plan_of(*words, *(f"actor_rollout_ref.model.{k}=true" for k in more)).memory
        for more in ((), ("enable_activation_offload",), ("use_fused_kernels",))
    )
    assert plain is not None
    assert fused is not None
    assert plain == offloaded
    # Three copies of a chunk of 2^24 logits, or of 2^23.
    assert plain.phases[2].total - fused.phases[2].total == 3 * 4 * (1 << 23)


def test_pages_are_held_while_the_policy_learns_unless_they_are_given_back() -> None:
    freed = "actor_rollout_ref.rollout.free_cache_engine=true"
    kept, given_back = (plan_of(*w, machine=H200).memory for w in ((), (freed,)))
    assert kept is not None
    assert given_back is not None
    assert kept.phases[2].parts["kv cache"] == kept.kv_demand
    assert "kv cache" not in given_back.phases[2].parts
    assert given_back.phases[0] == kept.phases[0]


def test_a_supervised_run_has_one_phase() -> None:
    memory = plan_of("trainer.stage=sft").memory
    assert memory is not None
    assert [phase.name for phase in memory.phases] == ["update"]


def test_samples_of_a_group_hold_their_prompt_once() -> None:
    alone = plan_of().memory
    groups = plan_of("actor_rollout_ref.rollout.n=8", "algorithm.adv_estimator=grpo").memory
    assert alone is not None
    assert groups is not None
    assert alone.kv_demand == 256 * (512 + 512) * 2 * 5 * 2 * 32 * 4
    assert groups.kv_demand == (256 * 512 + 32 * 512) * 2 * 5 * 2 * 32 * 4


def test_lora_trains_only_the_adapter() -> None:
    memory = plan_of("actor_rollout_ref.model.lora_rank=4").memory
    assert memory is not None
    parts = {phase.name: phase.parts for phase in memory.phases}["update"]
    # per layer: q and o (128+128), k and v (128+64), three feed-forward (128+384)
    adapter = 5 * 4 * (2 * 256 + 2 * 192 + 3 * 512)
    assert parts["gradients"] == adapter * 4
    assert parts["optimizer"] == adapter * 8


def test_the_reference_is_a_copy_or_the_adapter_switched_off() -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    roles = {r.name: r.engine for r in plan_of(kl).where.roles}
    assert roles["reference"] == "a frozen copy"
    lora = plan_of(kl, "actor_rollout_ref.model.lora_rank=4")
    assert {r.name: r.engine for r in lora.where.roles}["reference"].startswith("the actor")
    assert lora.memory is not None
    assert "reference" not in lora.memory.phases[0].parts


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
def test_a_critic_is_there_exactly_when_the_estimator_reads_values(name: str) -> None:
    roles = {r.name for r in plan_of(f"algorithm.adv_estimator={name}").where.roles}
    assert ("critic" in roles) == (name == "gae")


def test_auto_chooses_device_runtime_and_engine() -> None:
    assert plan_of().where.device == "cpu"
    assert plan_of(machine=H200).where.device == "cuda"
    many = plan_of("trainer.nnodes=2").where
    assert (many.runtime, many.roles[0].engine) == ("ray", "fsdp2")


def test_a_model_too_large_is_said_not_to_fit() -> None:
    big = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "vocab_size": 128256,
        "intermediate_size": 28672,
    }
    override = json.dumps(big).replace('"', "")
    found = check([], [f"actor_rollout_ref.model.override_config={override}"], machine=H200)
    assert "P02" in {p.id for p in found.problems}
    assert found.plan.memory is not None
    assert not found.plan.memory.fits


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "[1]",
        "null",
        '{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 0, "vocab_size": 9}',
        '{"num_hidden_layers": "x", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}',
    ],
)
def test_a_config_that_says_no_sizes_gives_no_shape(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_shape(ModelConfig(path=str(tmp_path))) is None


@pytest.mark.parametrize("path", ["~no-such-user/model", "x**y", "a\0b", "a" * 300])
def test_a_path_that_cannot_exist_gives_no_shape(path: str) -> None:
    assert read_shape(ModelConfig(path=path)) is None


def test_a_null_text_config_is_no_text_config(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "text_config": None}))
    assert read_shape(ModelConfig(path=str(tmp_path))) == shape_from(sizes)


def test_experts_have_their_own_width() -> None:
    shape = shape_from(
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "vocab_size": 151936,
        }
    )
    assert shape is not None
    assert round(shape.parameters() / 1e9, 1) == 30.5


def test_an_expert_that_computes_every_token_is_counted_once() -> None:
    shape = shape_from(
        {
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "vocab_size": 151936,
        }
    )
    assert shape is not None
    # What Qwen1.5-MoE-A2.7B is said to have.
    assert round(shape.parameters() / 1e9, 1) == 14.3
    active = shape.layers * shape.active_layer_parameters() + shape.embeddings()
    assert round(active / 1e9, 1) == 2.7
    trained = sum(tensor.total for tensor in whole_tensors(shape))
    assert trained == shape.parameters()
