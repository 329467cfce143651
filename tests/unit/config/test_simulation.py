"""Simulated steps: against measured figures, and against numbers worked out by hand."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.main import app
from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.model_folder.config_json import ModelShape, shape_from
from luyen.config.model_memory import PassMemory, PassTokens
from luyen.config.schema.model import ModelConfig
from luyen.config.simulation.cost import (
    Cost,
    GenerationWork,
    ModelCost,
    PassWork,
    ShardCost,
    ShardLayout,
    decode_segments,
)
from luyen.config.simulation.hardware import H200
from luyen.config.simulation.scales import PUBLISHED, Scenario, planned_scales, published_shape
from luyen.config.simulation.step import Simulation, needs_old_pass
from tests.architecture.tree import ROOT

ARR = "actor_rollout_ref"
BAR = 0.20
RECIPES = {"qwen_7b": 8, "qwen_32b": 32, "llama_70b": 128, "qwen_30b_a3b": 16}
"""Recipe -> GPUs that it is written for, or fits at least."""
ROWS = "arithmetic://sum?traces=1"
SFT = (
    "trainer.stage=sft",
    "trainer.n_gpus_per_node=1",
    f"data.train_files={ROWS}",
    f"data.val_files={ROWS}",
)
TINY = ModelShape(
    layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10, is_tied=True
)


def simulated(*words: str, gpus: tuple[int, ...] = (), **more) -> list[Simulation]:
    file, *overrides = words
    scenario = Scenario(files=(Path(file),), overrides=tuple(overrides), gpus=gpus, **more)
    found = [scale.step for scale in planned_scales(scenario, simulates=True)]
    assert all(step is not None for step in found)
    return [step for step in found if step is not None]


def recipe(name: str) -> str:
    return str(ROOT / "recipes" / "cluster" / f"{name}.yaml")


def seconds(step: Simulation) -> dict[str, float]:
    return {phase.name: phase.cost.seconds for phase in step.phases}


def predictions() -> ModuleType:
    """The script that prints the table of the page."""
    spec = importlib.util.spec_from_file_location(
        "predictions", ROOT / "benchmarks" / "predictions.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predictions"] = module  # its records look their module up
    spec.loader.exec_module(module)
    return module


def test_predictions_are_within_a_fifth_of_what_was_measured_on_an_h200():
    made = predictions()
    figures = made.figures()
    held_out = [one for one in figures if one.use == made.HELD_OUT]
    assert len(held_out) >= 12
    far = {one.name: one.error for one in figures if one.use != made.MISSED}
    assert {name: error for name, error in far.items() if abs(error) > BAR} == {}


def test_what_is_called_a_miss_is_one():
    made = predictions()
    missed = [one for one in made.figures() if one.use == made.MISSED]
    assert missed
    assert all(abs(one.error) > BAR for one in missed)


def test_the_page_shows_predictions_scales_and_constants():
    page = (ROOT / "docs" / "simulate.md").read_text()
    made = predictions()
    for table in (made.table(), made.scale_table(), made.constants_table()):
        assert table in page, "run python benchmarks/predictions.py"


# Costs by hand.


def test_segments_of_rows_that_end_apart_read_what_each_row_reads():
    work = GenerationWork(prompts=3, prompt=(4, 4), new=(2, 6), rows=2)
    lengths = work.lengths()
    tokens = sum(steps * rows for steps, rows, _ in decode_segments(work))
    read = sum(contexts for _, _, contexts in decode_segments(work))
    assert tokens == sum(new - 1 for _, new in lengths)
    assert read == sum(4 + j for _, new in lengths for j in range(1, new))
    assert all(rows <= 2 for _, rows, _ in decode_segments(work))


def test_a_decode_step_takes_its_bytes_its_products_and_its_layers():
    # Layers of 8 x 16 + 8 x 8 + 3 x 8 x 16 + 16 = 592 weights, a head of 80; keys of 2 x 2 x 4.
    cost = ModelCost(shape=TINY, hardware=H200).decode_step(rows=3, contexts=30.0)
    assert cost.latency == 2 * 30.5e-6
    products = 3 * 2 * (2 * (592 - 16) + 80)
    assert cost.compute == pytest.approx(products / (7.7e14 * 0.71))
    moved = 2 * (2 * 592 + 80) + 2 * 3 * 10 * 2
    assert cost.memory == pytest.approx(moved / 4.2e12 + 30 * 2 * 16 / (4.2e12 * 1.02))
    assert cost.network == 0


def test_an_eager_step_waits_for_launches():
    graph, eager = (
        ModelCost(shape=TINY, hardware=H200, is_eager=e).decode_step(rows=1, contexts=1.0)
        for e in (False, True)
    )
    assert eager.latency / graph.latency == pytest.approx(1.27e-3 / 30.5e-6)


def test_a_mixture_reads_the_experts_that_rows_chose():
    experts = replace(TINY, experts=4, experts_per_token=1)
    one = ModelCost(shape=experts, hardware=H200).decode_step(rows=1, contexts=0.0)
    all_ = ModelCost(shape=replace(experts, experts_per_token=4), hardware=H200)
    # 592 - 384 weights of a layer are no experts; one of four is 384.
    own = 2 * (2 * 592 + 80) + 2 * 10 * 2
    assert one.memory == pytest.approx(own / 4.2e12)
    everything = 2 * (2 * (592 + 3 * 384) + 80) + 2 * 10 * 2
    assert all_.decode_step(rows=1, contexts=0.0).memory == pytest.approx(everything / 4.2e12)


def test_transfers_of_shards_are_hidden_behind_the_pass_or_added():
    layout = ShardLayout(world=8, share=8, ranks_per_sequence=1)
    shards = ShardCost(shape=TINY, hardware=H200, layout=layout, learned=TINY.parameters())
    rate = 450e9 * 0.75
    layers, root = 2 * 592 * 2, (80 + 8) * 2
    sent = 7 / 8 * (layers + root)
    long = shards.around(Cost(compute=1.0), learns=False)
    assert long.sent == sent
    assert long.seconds == pytest.approx(1.0 + 7 / 8 * root / rate)
    short = shards.around(Cost(), learns=False)
    # Three units, each with the latency of three doublings.
    assert short.seconds == pytest.approx(sent / rate + 3 * 3 * 10e-6)
    learning = shards.around(Cost(), learns=True)
    assert learning.sent == 7 / 8 * (2 * layers + root + 4 * TINY.parameters())


def test_nodes_are_connected_by_their_adapters():
    # Eight adapters of 50e9 x 0.8 carry 320e9, less than the links of a node.
    assert H200.ring_rate(8) == 337.5e9
    assert H200.ring_rate(16) == 320e9
    slow = H200.with_values({"network_rate": 5e9})
    assert slow.ring_rate(8) == 337.5e9
    assert slow.ring_rate(16) == 32e9
    with pytest.raises(UserError, match="there is no such constant"):
        H200.with_values({"link_rat": 1.0})


def test_a_sum_over_copies_goes_through_one_adapter_of_each_rank():
    layout = ShardLayout(world=16, share=8, ranks_per_sequence=1)
    shards = ShardCost(shape=TINY, hardware=H200, layout=layout, learned=1_000)
    alone = replace(shards, layout=replace(layout, world=8))
    extra = shards.around(Cost(), learns=True).sent - alone.around(Cost(), learns=True).sent
    assert extra == pytest.approx(2 * 1 / 2 * 1_000 * 4 / 8)


# Whole steps.


@pytest.mark.parametrize(("name", "gpus"), RECIPES.items())
def test_every_large_recipe_fits_141_gb_and_is_the_sum_of_its_phases(name: str, gpus: int):
    [step] = simulated(recipe(name), gpus=(gpus,))
    assert step.gpus == gpus
    assert step.memory.fits
    assert step.seconds == pytest.approx(sum(seconds(step).values()))
    assert {"generate", "score", "update", "publish"} <= seconds(step).keys()
    peaks = {phase.name: phase.memory_bytes for phase in step.phases}
    assert peaks["update"] == next(p.total for p in step.memory.phases if p.name == "update")


def test_more_gpus_shorten_the_update_and_not_the_controller():
    few, many = simulated(recipe("qwen_7b"), gpus=(8, 64))
    assert seconds(many)["update"] < seconds(few)["update"] / 7
    assert seconds(many)["score"] == seconds(few)["score"]
    grown = simulated(recipe("qwen_7b"), gpus=(8, 64), scales_batch=True)[1]
    assert seconds(grown)["score"] == pytest.approx(8 * seconds(few)["score"])
    assert seconds(grown)["generate"] == pytest.approx(seconds(few)["generate"])


def test_copies_without_a_prompt_are_named():
    [step] = simulated(recipe("qwen_7b"), gpus=(256,))
    assert "128 of 256 copies of the engine get no prompt" in step.remarks


def test_one_step_ahead_hides_generation_behind_training():
    [step] = simulated(recipe("one_node_async"))
    assert step.hidden_s > 0
    training = sum(s for name, s in seconds(step).items() if name not in ("generate", "publish"))
    longer = max(seconds(step)["generate"], training)
    assert step.seconds == pytest.approx(longer + seconds(step)["publish"])
    assert step.gpus == 8


def test_validations_and_checkpoints_count_by_their_share():
    plain, *_ = simulated(recipe("one_node"))
    often = simulated(recipe("one_node"), "trainer.save_freq=1")[0]
    assert seconds(often)["save"] == pytest.approx(20 * seconds(plain)["save"])
    [with_rows] = simulated(recipe("one_node"), val_rows=128)
    assert "validate" in seconds(with_rows)
    assert "validate" not in seconds(plain)


def test_an_adapter_moves_and_learns_less():
    full, lora = (
        simulated(recipe("one_node"), *words)[0] for words in ((), (f"{ARR}.model.lora_rank=32",))
    )
    assert seconds(lora)["update"] < seconds(full)["update"]
    assert seconds(lora)["publish"] < seconds(full)["publish"] / 10
    assert lora.phases[0].cost == full.phases[0].cost


def test_a_reference_a_critic_and_old_log_probabilities_take_passes():
    words = (
        "algorithm.adv_estimator=gae",
        f"{ARR}.actor.use_kl_loss=true",
        f"{ARR}.actor.ppo_mini_batch_size=64",
    )
    [step] = simulated(recipe("one_node"), *words)
    assert {"log-probs", "reference", "critic"} <= seconds(step).keys()
    [plain] = simulated(recipe("one_node"))
    assert not {"log-probs", "reference", "critic"} & seconds(plain).keys()


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.rollout_correction.rollout_is=token",),
        ("algorithm.rollout_correction.bypass_mode=true",),
        (f"{ARR}.actor.ppo_mini_batch_size=512",),
        ("algorithm.use_kl_in_reward=true",),
    ],
)
def test_the_pass_for_old_log_probabilities_is_that_of_the_loop(estimator: str, words):
    from luyen.train.batch import required_signals

    overrides = ("data.train_files=arithmetic://sum", f"algorithm.adv_estimator={estimator}")
    config = check([], (*overrides, *words), machine=Machine(cpus=1, ram_bytes=1)).config
    facts = ADV_ESTIMATORS[estimator]
    needs = required_signals(config, facts)
    is_made = needs.old_logp == "compute" or needs.sum_pi_squared
    assert needs_old_pass(config, facts) == is_made


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (SFT, "trainer.stage"),
        (("trainer.device=cpu",), "trainer.device"),
        ((f"{ARR}.rollout.name=hf",), f"{ARR}.rollout.name"),
    ],
)
def test_what_cannot_be_simulated_is_refused(words: tuple[str, ...], field: str):
    with pytest.raises(UserError) as error:
        simulated(recipe("one_node"), *words)
    assert error.value.field == field


def test_a_server_that_ray_gives_too_few_gpus_is_refused_by_the_rule_of_check():
    words = ("name=vllm", "tensor_model_parallel_size=2", "server.accept_gap=true")
    overrides = tuple(f"{ARR}.rollout.{word}" for word in words)
    scenario = Scenario(files=(Path(recipe("one_node")),), overrides=overrides)
    [scale] = planned_scales(scenario, simulates=True)
    assert scale.step is None
    assert [p.id for p in scale.report.problems if p.severity == "error"] == ["R30"]


def test_servers_that_run_already_bring_gpus_of_their_own():
    [step] = simulated(
        recipe("one_node"),
        f"{ARR}.rollout.name=vllm",
        f"{ARR}.rollout.tensor_model_parallel_size=4",
        f"{ARR}.rollout.server_urls=[http://a:1,http://b:1]",
        f"{ARR}.rollout.server.accept_gap=true",
    )
    assert step.gpus == 8 + 2 * 4
    assert step.phases[0].cost.sent > 0


def test_a_passes_tokens_are_those_that_ranks_share():
    whole = PassWork(tokens=8, scored=8, context=4.0)
    layout = ShardLayout(world=2, share=2, ranks_per_sequence=2)
    shards = ShardCost(shape=TINY, hardware=H200, layout=layout, learned=0)
    # Queries, keys, values (16) and what attention gave (8), half of them, two bytes, two layers.
    assert shards.exchange(whole.tokens, learns=False).sent == 2 * 0.5 * 8 * 2 * (16 + 8)


# The command.


def test_the_command_prints_phases_a_table_and_json(tmp_path: Path):
    run = CliRunner().invoke
    one = run(app, ["plan", "--simulate", recipe("one_node")])
    assert one.exit_code == 0, one.output
    assert "bound by" in one.stdout
    assert "Assumed, not measured: " in one.stdout
    table = run(app, ["plan", "--simulate", recipe("qwen_7b"), "--gpus", "1,8"])
    assert table.exit_code == 1
    assert "does NOT fit" in table.stdout
    words = ["plan", "--simulate", recipe("one_node"), "--constant", "network_rate=1e9", "--json"]
    page = json.loads(run(app, words).stdout)
    assert page["constants"]["network_rate"]["source"] == "given"
    step = page["plans"][0]["step"]
    assert step["seconds"] == pytest.approx(sum(p["seconds"] for p in step["phases"].values()))
    plain = run(app, ["plan", recipe("one_node")])
    assert plain.exit_code == 0
    assert "seconds" not in plain.stdout


def test_a_configuration_that_check_refuses_is_not_simulated():
    refused = CliRunner().invoke(
        app, ["plan", "--simulate", recipe("one_node"), "trainer.nnodez=2"]
    )
    assert refused.exit_code == 1
    assert "did you mean `trainer.nnodes`?" in refused.stdout
    assert "tokens/s" not in refused.stdout


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--gpus", "8,x"), "--gpus"),
        (("--gpus", "12"), "--gpus"),
        (("--constant", "link_rate"), "--constant"),
        (("--response-tokens", "99999"), "--response-tokens"),
    ],
)
def test_wrong_options_are_named(words: tuple[str, ...], field: str):
    result = CliRunner().invoke(app, ["plan", "--simulate", recipe("one_node"), *words])
    assert isinstance(result.exception, UserError)
    assert result.exception.field == field


def test_a_model_without_a_shape_takes_one_from_a_file(tmp_path: Path):
    words = (recipe("one_node"), f"{ARR}.model.path=someone/else")
    with pytest.raises(UserError, match="--model-config"):
        simulated(*words)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]))
    [given], [named] = simulated(*words, model_config=file), simulated(recipe("one_node"))
    assert given.phases == named.phases


def test_published_sizes_are_those_of_their_names():
    """Biases, norms of heads and routers are not counted."""
    billions = {name: published_shape(name).parameters() / 1e9 for name in PUBLISHED}  # type: ignore[union-attr]
    assert [round(size, 2) for size in billions.values()] == [
        0.13, 0.49, 1.54, 7.62, 32.76, 70.55, 30.52,
    ]  # fmt: skip
    mixture = shape_from(PUBLISHED["Qwen/Qwen3-30B-A3B"])
    assert mixture is not None
    # 48 layers of 18.9M attention, 8 experts of 4.7M, a router of 0.3M, and two tables of 311M.
    active = 48 * mixture.active_layer_parameters() + mixture.embeddings()
    assert round(active / 1e9, 2) == 3.35


def test_planning_never_loads_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from luyen.cli.main import app; "
        f"done = CliRunner().invoke(app, ['plan', '--simulate', {recipe('one_node')!r}]); "
        "print(done.exit_code); "
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0", "[]"]


def test_a_mixture_keeps_the_activations_of_every_expert_of_a_token():
    # Without a head, a stream or attention in the way: 3 x 16 numbers a token for each expert.
    tokens = PassTokens(packed=100, padded=100, computed=100, scored=0)
    one, two = (
        PassMemory(
            shape=replace(TINY, experts=4, experts_per_token=number),
            model=ModelConfig(),
            tokens=tokens,
            width=2,
            device="cuda",
        ).kept()
        for number in (1, 2)
    )
    assert two - one == 3 * 16 * 100 * 2
