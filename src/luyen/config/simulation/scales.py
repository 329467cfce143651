"""A configuration on several numbers of simulated GPUs: problems, memory, and a step of each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.input_files import read_text
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.memory import MemoryPlan, plan_memory
from luyen.config.model_folder.config_json import ModelShape, shape_from, text_config, unplanned
from luyen.config.plan import reward_pool
from luyen.config.schema.run import RunConfig
from luyen.config.simulation.hardware import H200, Hardware
from luyen.config.simulation.step import RolloutLengths, Simulation
from luyen.config.simulation.step import simulate as simulate_step

_GIB = 1024**3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a plan is made for.

    Example:
        >>> Scenario(files=(Path("recipes/quickstart.yaml"),)).gpus
        ()
    """

    files: tuple[Path, ...]
    """YAML files."""
    overrides: tuple[str, ...] = ()
    """Overrides as key=value."""
    gpus: tuple[int, ...] = ()
    """GPUs of each plan; empty: those of the configuration."""
    scales_batch: bool = False
    """Whether batches grow with GPUs, from the first number on."""
    hardware: Hardware = H200
    """What the GPUs do."""
    model_config: Path | None = None
    """A `config.json`, in place of that of the model."""
    prompt_tokens: int | None = None
    """Mean tokens of a prompt; None: the most."""
    response_tokens: int | None = None
    """Mean tokens of an answer; None: the most."""
    val_rows: int = 0
    """Rows of a validation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScale:
    """The plan for one number of GPUs.

    Example:
        Made by `planned_scales`.
    """

    report: Report
    """What `check` found."""
    memory: MemoryPlan
    """Memory of each phase."""
    gpus: int
    """GPUs of all pools."""
    shape: ModelShape
    """Of the model."""
    step: Simulation | None
    """A simulated step; None where none was wanted, or errors were found."""

    @property
    def is_sound(self) -> bool:
        """Whether `check` found no error, and the GPUs hold it."""
        return self.report.is_sound and self.memory.fits


def planned_scales(scenario: Scenario, *, simulates: bool) -> Iterator[PlannedScale]:
    """The plan for each number of GPUs; a UserError where the model's shape is not known."""
    files, overrides = scenario.files, scenario.overrides
    base = _checked(files, overrides, scenario.hardware)
    scales = scenario.gpus or (_devices(base),)
    for gpus in scales:
        words = [*overrides]
        if scenario.gpus:
            factor = gpus / scales[0] if scenario.scales_batch else 1
            words += _scaled(base, gpus, factor, scenario.hardware)
        report = _checked(files, words, scenario.hardware)
        shape = _shape(report, scenario.model_config)
        machine, plan = _machine(scenario.hardware), report.plan
        step = None
        if simulates and report.is_sound:
            step = simulate_step(
                report.config,
                shape,
                plan.batch,
                plan.where,
                hardware=scenario.hardware,
                lengths=_lengths(report.config, scenario),
            )
        memory = plan_memory(report.config, shape, plan.batch, plan.where, machine)
        yield PlannedScale(
            report=report, memory=memory, gpus=_devices(report), shape=shape, step=step
        )


def _machine(hardware: Hardware) -> Machine:
    """Any node that trains; pools and ranks are compared with its GPUs."""
    gpus = (hardware.memory_bytes,) * 1024
    return Machine(cpus=128, ram_bytes=2048 * _GIB, gpu_bytes=gpus, is_assumed=True)


def _checked(files: Sequence[Path], words: Sequence[str], hardware: Hardware) -> Report:
    """What `check` finds where packages are installed; a UserError for an unreadable file."""
    machine = _machine(hardware)
    report = check(files, words, machine=machine, installed=lambda _: True, starts_a_run=False)
    if not report.is_whole:
        report.require_sound()
    return report


def _lengths(config: RunConfig, scenario: Scenario) -> RolloutLengths:
    prompt, answer = scenario.prompt_tokens, scenario.response_tokens
    return RolloutLengths(
        prompt=config.data.max_prompt_length if prompt is None else prompt,
        answer=config.data.max_response_length if answer is None else answer,
        validation_rows=scenario.val_rows,
    )


def _pools(report: Report) -> dict[str, tuple[int, int]]:
    """Machines, and devices of each, by the block whose `nnodes` says so."""
    config, where = report.config, report.plan.where
    pools = {
        "trainer": (config.trainer.nnodes, config.trainer.n_gpus_per_node),
        "actor_rollout_ref.rollout": where.rollout_pool,
        "actor_rollout_ref.ref": where.reference_pool,
        "critic": where.critic_pool,
        "reward.reward_model": reward_pool(config),
    }
    return {block: pool for block, pool in pools.items() if pool is not None}


def _devices(report: Report) -> int:
    return sum(nodes * each for nodes, each in _pools(report).values())


def _scaled(base: Report, gpus: int, factor: float, hardware: Hardware) -> Iterator[str]:
    """Overrides that make a configuration one for so many GPUs."""
    config, pools, own, each = base.config, _pools(base), _devices(base), hardware.gpus_per_node
    if len(pools) == 1:
        if gpus < 1 or (gpus > each and gpus % each):
            why, fix = f"nodes have {each} GPUs each", f"take less than {each}, or whole nodes"
            raise UserError("--gpus", gpus, why, fix)
        yield f"trainer.nnodes={max(1, gpus // each)}"
        yield f"trainer.n_gpus_per_node={min(gpus, each)}"
    elif gpus < 1 or any(nodes * gpus % own for nodes, _ in pools.values()):
        words = ", ".join(f"{block} {nodes} x {n}" for block, (nodes, n) in pools.items())
        least = own // gcd(*(nodes for nodes, _ in pools.values()))
        why = f"the pools ({words}) keep their proportions, in whole nodes"
        raise UserError("--gpus", gpus, why, f"take a multiple of {least}")
    else:
        for block, (nodes, _) in pools.items():
            yield f"{block}.nnodes={nodes * gpus // own}"
    if factor != 1:
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        yield f"data.train_batch_size={round(config.data.train_batch_size * factor)}"
        yield f"actor_rollout_ref.actor.ppo_mini_batch_size={round(mini * factor)}"


def _shape(report: Report, file: Path | None) -> ModelShape:
    """From the given file, the model's folder, or the published numbers of its name."""
    model = report.config.actor_rollout_ref.model
    known = report.plan.shape or published_shape(model.path)
    found = known if file is None else _read(file)
    if found is None:
        fix = "give its config.json by --model-config FILE"
        raise UserError("actor_rollout_ref.model.path", model.path, unplanned(model), fix)
    return found


def _read(file: Path) -> ModelShape:
    try:
        raw: Any = json.loads(read_text(file))
    except ValueError as error:
        fix = "give a config.json of Hugging Face"
        raise UserError("--model-config", str(file), f"it is no JSON: {error}", fix) from error
    shape = shape_from(text_config(raw, {})) if isinstance(raw, dict) else None  # pyright: ignore[reportUnknownArgumentType]
    if shape is None:
        why = "it names its sizes otherwise than the decoders that are planned for"
        raise UserError("--model-config", str(file), why, "give that of a decoder")
    return shape


# Options of the command as values.


def numbers_of_gpus(text: str | None) -> tuple[int, ...]:
    """Numbers as in `8,64`, smallest first; a UserError for anything else."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        why, fix = "numbers above 0 are due", "write them as in 8,64,256"
        raise UserError("--gpus", text, why, fix)
    return tuple(sorted({int(word) for word in words}))


def given_constants(given: Sequence[str]) -> dict[str, float]:
    """Constants as NAME=VALUE; a UserError where the value is no number."""
    found: dict[str, float] = {}
    for word in given:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            why, fix = "a number is due", "write NAME=VALUE, such as link_share=0.6"
            raise UserError("--constant", word, why, fix) from error
    return found


# Sizes of published models by their name on the hub, as in each `config.json`.

_QWEN25 = {"vocab_size": 152064, "num_key_value_heads": 8}
_TIED = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}

PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_TIED,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_TIED,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN25,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        **_QWEN25,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
"""Name of a model -> the sizes in its `config.json`."""


def published_shape(name: str) -> ModelShape | None:
    """The shape of a published model; None for a name that is not listed.

    Example:
        >>> shape = published_shape("Qwen/Qwen3-30B-A3B")
        >>> shape is not None and round(shape.parameters() / 1e9, 1)
        30.5
    """
    return shape_from(PUBLISHED[name]) if name in PUBLISHED else None
