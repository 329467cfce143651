"""Pools, copies and shards in the plan of a run, against numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.memory import plan_memory
from luyen.config.model_folder.config_json import ModelShape

GIB = 1024**3
GPUS = Machine(cpus=64, ram_bytes=512 * GIB, gpu_bytes=(80 * GIB,) * 16)
SHAPE = ModelShape(
    layers=10, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=2048, vocab=1000,
    is_tied=False,
)  # fmt: skip
LAYER = 512 * (16 * 64 + 8 * 64) + 3 * 512 * 2048 + 2 * 512
ENDS = 2 * 1000 * 512 + 512
ALL = 10 * LAYER + ENDS
ARR = "actor_rollout_ref"
FSDP = f"{ARR}.actor.fsdp_config"
OFFLOAD = (f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")


def report_of(*words: str) -> Report:
    given = [
        "data.train_files=arithmetic://sum",
        "algorithm.adv_estimator=grpo",
        f"{ARR}.rollout.n=4",
    ]
    return check([], [*given, *words], machine=GPUS)


def phases(*words: str) -> dict[str, dict[str, int]]:
    report = report_of(*words)
    plan = report.plan
    memory = plan_memory(report.config, SHAPE, plan.batch, plan.where, GPUS)
    return {phase.name: phase.parts for phase in memory.phases}


def test_every_device_has_a_copy_unless_a_number_is_given():
    assert report_of().plan.where.replicas == 1
    assert report_of("trainer.n_gpus_per_node=4").plan.where.replicas == 4
    assert (
        report_of(
            "trainer.n_gpus_per_node=4", f"{ARR}.rollout.data_parallel_size=2"
        ).plan.where.replicas
        == 2
    )
    own = ("trainer.n_gpus_per_node=4", f"{ARR}.rollout.nnodes=2")
    where = report_of(*own).plan.where
    assert (where.replicas, where.rollout_pool, where.runtime) == (8, (2, 4), "ray")
    assert {r.name: r.place for r in where.roles}["rollout"] == "2 x 4 cuda of its own"


def test_shards_are_fp32_and_the_copy_that_draws_is_whole():
    parts = phases("trainer.n_gpus_per_node=4")["update"]
    assert parts["weights"] == ALL * 4 // 4
    assert parts["optimizer"] == ALL * 8 // 4
    assert parts["gradients"] == ALL * 4 // 4
    assert parts["replica"] == ALL * 2
    # Two layers and the ends in bf16, and one layer's gradient in bf16 and, to be summed, in fp32.
    assert parts["gathered"] == (ENDS + 2 * LAYER) * 2 + LAYER * 6


def test_copies_of_what_learns_are_sharded_over_fewer():
    parts = phases("trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{FSDP}.fsdp_size=4")["update"]
    assert parts["weights"] == ALL * 4 // 4


def test_what_is_offloaded_is_not_on_the_device():
    parts = phases("trainer.n_gpus_per_node=4", *OFFLOAD)["update"]
    assert not parts.keys() & {"weights", "optimizer", "gradients"}
    assert parts["replica"] == ALL * 2


def test_on_one_gpu_an_offloaded_optimizer_leaves_its_pieces_and_what_is_learned():
    whole, moved = phases()["update"], phases(f"{FSDP}.optimizer_offload=true")["update"]
    assert whole["optimizer"] == ALL * 12
    # Three numbers of every weight, or of 3 pieces of 2^25.
    assert moved["optimizer"] == 12 * min(ALL, 3 * 2**25)
    for part in ("weights", "gradients"):
        assert moved[part] == whole[part]


def test_an_adapter_leaves_frozen_shards_in_their_type():
    adapter = SHAPE.lora_parameters(8)
    parts = phases("trainer.n_gpus_per_node=4", f"{ARR}.model.lora_rank=8")["update"]
    assert parts["weights"] == (adapter * 4 + ALL * 2) // 4
    assert parts["optimizer"] == adapter * 8 // 4


def test_with_a_pool_of_its_own_the_copy_and_its_cache_lie_elsewhere():
    found = phases("trainer.n_gpus_per_node=4", f"{ARR}.rollout.nnodes=1")
    assert found["generate"].keys() <= {"replica", "kv cache", "activations", "logits"}
    assert not found["update"].keys() & {"replica", "kv cache"}


@pytest.mark.parametrize("name", ["num_attention_heads", "intermediate_size", "vocab_size"])
def test_layers_that_devices_cannot_divide_are_refused(name: str):
    size = f"{FSDP}.tensor_parallel_size=2"
    assert "F10" not in [p.id for p in report_of("trainer.n_gpus_per_node=2", size).problems]
    odd = {"num_attention_heads": 3, "intermediate_size": 99, "vocab_size": 101}[name]
    model = f"{ARR}.model.override_config={{{name}: {odd}, num_key_value_heads: 1, head_dim: 16}}"
    report = report_of("trainer.n_gpus_per_node=2", size, model)
    [problem] = [p for p in report.problems if p.id == "F10"]
    assert f"{name} is {odd}" in problem.why
    assert problem.fix == f"set it to a divisor of {odd}"


OTHERS = {
    "critic.model.path": ("algorithm.adv_estimator=gae", f"{ARR}.rollout.n=1"),
    f"{ARR}.ref.path": (f"{ARR}.actor.use_kl_loss=true",),
    "distill.teacher_path": ("distill.on_policy=true",),
}
"""Key of another model than the policy -> words with which a run has it."""


@pytest.mark.parametrize("key", OTHERS)
def test_every_model_on_the_devices_is_one_that_they_divide(key: str, tmp_path: Path):
    def refused(*words: str) -> list[tuple[str, str]]:
        named = f"{key}={tmp_path}"
        report = report_of("trainer.n_gpus_per_node=2", named, *OTHERS[key], *words)
        ids = ("F10", "F17", "M08")
        return [(p.id, p.why) for p in report.problems if p.id in ids and p.field == key]

    def names(**config: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))

    divided, megatron = f"{FSDP}.tensor_parallel_size=2", f"{ARR}.actor.strategy=megatron"
    names(num_attention_heads=3)
    assert refused() == []
    why = "the model's num_attention_heads is 3, which 2 devices cannot divide"
    assert refused(divided) == [("F10", why)]
    assert refused(divided, megatron) == [("F17", why)]
    names(model_type="gemma2")
    assert refused(divided) == [
        ("F10", "how the layers of a gemma2 model are divided is not known")
    ]
    assert [name for name, _ in refused(megatron)] == ["F17"]
    names(model_type="mamba")
    assert refused() == [("M08", "transformers itself runs a mamba model, which is not sharded")]


def test_an_adapter_of_the_embedding_is_not_divided():
    words = (f"{ARR}.model.lora_rank=4", "trainer.n_gpus_per_node=2")
    target = f"{ARR}.model.target_modules=[q_proj, embed_tokens]"
    assert "F11" not in [p.id for p in report_of(*words, target).problems]
    report = report_of(*words, target, f"{FSDP}.tensor_parallel_size=2")
    [problem] = [p for p in report.problems if p.id == "F11"]
    assert problem.field == f"{ARR}.model.target_modules"


def test_an_adapter_of_the_output_layer_is_refused_on_a_gpu(tmp_path: Path):
    def found(device: str) -> list[str]:
        words = (f"{ARR}.model.lora_rank=4", f"{ARR}.model.target_modules=[q_proj, lm_head]")
        report = report_of(*words, f"{ARR}.model.path={tmp_path}", f"trainer.device={device}")
        return [p.fix for p in report.problems if p.id == "M12"]

    assert found("cpu") == []
    assert found("cuda") == ["leave lm_head out"]


def test_devices_that_divide_layers_gather_a_part_and_hold_as_much():
    whole = phases("trainer.n_gpus_per_node=4")["update"]
    divided = phases("trainer.n_gpus_per_node=4", f"{FSDP}.tensor_parallel_size=4")["update"]
    assert divided["weights"] == whole["weights"]
    assert divided["optimizer"] == whole["optimizer"]
    assert divided["gathered"] == pytest.approx(whole["gathered"] / 4, rel=0.05)
    assert divided["activations"] < whole["activations"]


@pytest.mark.parametrize(
    ("word", "why", "fix"),
    [
        (f"{FSDP}.ulysses_sequence_parallel_size=3", "2 devices train", "set it to one of 1, 2"),
        (f"{FSDP}.tensor_parallel_size=3", "2 devices train", "set it to 1 or to a divisor of 2"),
        (f"{ARR}.rollout.tensor_model_parallel_size=4", "2 devices that generate", "divisor of 2"),
        (f"{ARR}.rollout.expert_parallel_size=2", "no effect", "drop the line"),
    ],
)
def test_what_would_split_a_sequence_or_a_model_is_told(word: str, why: str, fix: str):
    report = report_of(word, "trainer.n_gpus_per_node=2")
    [problem] = [p for p in report.problems if p.field == word.partition("=")[0]]
    assert problem.severity == ("warning" if why == "no effect" else "error")
    assert why in problem.why
    assert fix in problem.fix


def test_every_version_that_is_held_has_a_copy_of_what_learns():
    ahead = ("trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=token")
    cluster = "trainer.n_gpus_per_node=4"
    assert phases(*ahead)["generate"]["versions"] == 3 * ALL * 2
    assert phases(*ahead, cluster)["generate"]["versions"] == 2 * ALL * 2
    assert "versions" not in phases(*ahead, cluster, "trainer.async_order=completion")["generate"]


SERVER = (f"{ARR}.rollout.server.python=python3", f"{ARR}.rollout.server.accept_gap=true")
VLLM, SGLANG = ((*SERVER, f"{ARR}.rollout.name={name}") for name in ("vllm", "sglang"))
URL = f"{ARR}.rollout.server_urls=[http://a]"


def test_a_server_of_the_run_has_weights_of_its_own_beside_the_trainers():
    alone, beside = phases(), phases(*VLLM)
    assert "server" not in alone["generate"]
    assert beside["generate"]["server"] == ALL * 2
    assert beside["generate"]["weights"] == ALL * 2
    # Asleep, vLLM has its weights in host memory; SGLang gives back the cache alone.
    sleeps = f"{ARR}.rollout.free_cache_engine=true"
    assert not {"server", "kv cache"} & phases(*VLLM, sleeps)["update"].keys()
    assert "kv cache" not in phases(*SGLANG, sleeps)["update"]
    assert phases(*SGLANG, sleeps)["update"]["server"] == ALL * 2
    assert beside["update"]["server"] == ALL * 2
    assert beside["update"]["kv cache"] == beside["generate"]["kv cache"] > 0
    idle = phases(*VLLM, sleeps, "trainer.device=cpu")["update"]
    assert {"server", "kv cache"} <= idle.keys(), "no sleep mode on CPUs"


def test_every_version_in_use_has_a_server_and_each_sends_what_it_needs():
    ahead = (*VLLM, "trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=token")
    assert phases(*ahead)["generate"]["server"] == 3 * ALL * 2
    lora = (*VLLM, f"{ARR}.model.lora_rank=8")
    assert phases(*lora)["generate"]["server"] == ALL * 2, "merged"
    parts = phases(*lora, f"{ARR}.rollout.server.lora_format=adapter")["generate"]
    assert parts["server"] == (ALL + SHAPE.lora_parameters(8)) * 2


def test_running_servers_take_no_memory_of_the_run():
    parts = phases(f"{ARR}.rollout.name=vllm", URL, *SERVER[1:])
    assert not {"server", "kv cache", "logits"} & parts["generate"].keys()
    assert parts["generate"] == {"weights": ALL * 2, "optimizer": ALL * 12}


def test_a_server_of_the_run_has_the_one_gpu_that_ray_gives_it():
    two = (f"{ARR}.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4")
    [problem] = [p for p in report_of(*VLLM, *two).problems if p.severity == "error"]
    assert problem.id == "R30"
    assert report_of(*VLLM, "trainer.n_gpus_per_node=4").is_sound
    urls = f"{ARR}.rollout.server_urls=[http://a, http://b]"
    assert report_of(f"{ARR}.rollout.name=vllm", urls, *SERVER[1:], *two).is_sound
    # It is on GPUs of its own, of which the run has none to give.
    split = f"{ARR}.rollout.tensor_model_parallel_size=8"
    assert report_of(f"{ARR}.rollout.name=vllm", URL, *SERVER[1:], split).is_sound


def test_experts_of_a_server_are_shared_where_there_are_some_and_the_run_starts_it():
    words = (f"{ARR}.rollout.expert_parallel_size=2", *SERVER[1:], f"{ARR}.rollout.name=vllm")
    for more, rule in (((), "R33"), ((URL,), "R25")):
        report = report_of(*words, *more)
        [problem] = [p for p in report.problems if p.field.endswith("expert_parallel_size")]
        assert (problem.id, problem.severity) == (rule, "warning")


JUDGE = ("reward.reward_model.enable=true", "reward.reward_model.model_path=builtin://arithmetic")
OWN = ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")


def test_a_reward_model_rests_beside_others_and_stays_on_devices_of_its_own():
    shared = phases(*JUDGE)
    assert "reward model" in shared["judge"]
    assert "weights" in shared["judge"], "the policy is there while it judges"
    assert "reward model" not in shared["update"]
    kept = phases(*JUDGE, "reward.reward_model.param_offload=false")
    assert kept["update"]["reward model"] == kept["judge"]["reward model"]
    own = phases(*JUDGE, *(f"reward.reward_model.{word}" for word in OWN))
    assert own["judge"].keys() == {"reward model", "activations"}
    assert "reward model" not in own["update"]
    assert "judge" not in phases()


def test_a_pool_for_the_reward_model_asks_for_a_cluster():
    words = [f"reward.reward_model.{word}" for word in OWN]
    where = report_of(*JUDGE, *words).plan.where
    assert where.runtime == "ray"
    [role] = [role for role in where.roles if role.name == "reward model"]
    assert (role.engine, role.place) == ("2 copies of native", "1 x 2 cuda of its own")
    one = report_of(*JUDGE, *words, "reward.reward_model.rollout.data_parallel_size=1").plan.where
    assert one.roles[-1].engine == "native"
    assert report_of(*JUDGE).plan.where.runtime == "local"


def test_roles_with_pools_of_their_own_leave_the_devices_of_the_actor():
    shared = ("trainer.n_gpus_per_node=4", "algorithm.adv_estimator=gae", f"{ARR}.ref.enable=true")
    own = (*shared, f"{ARR}.ref.nnodes=1", "critic.nnodes=2", "critic.n_gpus_per_node=1")
    where = report_of(*own).plan.where
    assert where.rank_groups == (4, 4, 2)
    places = {role.name: (role.engine, role.place) for role in where.roles}
    assert places["reference"] == ("a frozen copy", "1 x 4 cuda of its own")
    assert places["critic"] == ("fsdp2", "2 x 1 cuda of its own")
    together, apart = phases(*shared), phases(*own)
    assert {"reference", "critic"} <= together["update"].keys()
    assert not {"reference", "critic"} & apart["update"].keys()
    assert apart["reference"]["reference"] == ALL * 2 // 4
    assert apart["critic"]["critic"] == ALL * 12 // 2


def test_a_pool_of_its_own_decides_what_is_sharded():
    words = (f"{ARR}.ref.enable=true", f"{ARR}.ref.nnodes=1", f"{ARR}.ref.n_gpus_per_node=4")
    found = [p.id for p in report_of(*words, f"{FSDP}.fsdp_size=3").problems]
    assert "F03" in found
    assert "F01" not in found
    assert "S02" in [p.id for p in report_of(*words, f"{ARR}.actor.strategy=single").problems]
