"""`luyen plan`: a configuration on GPUs that need not be here, its memory or a simulated step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

import typer

from luyen.base.errors import UserError, printable
from luyen.base.input_files import read_text
from luyen.cli.check import problem_lines, split_words, without_odd_values
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.memory import MemoryPlan, plan_memory
from luyen.config.model_folder.config_json import ModelShape, shape_from, text_config, unplanned
from luyen.config.plan import reward_pool
from luyen.config.schema.run import RunConfig
from luyen.config.simulation.hardware import H200, Hardware
from luyen.config.simulation.published_shapes import published_shape
from luyen.config.simulation.step import Lengths, Simulation
from luyen.config.simulation.step import simulate as simulate_step

_GIB = 1024**3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a plan is made for.

    Example:
        >>> Scenario(words=("recipes/quickstart.yaml",)).gpus
        ()
    """

    words: tuple[str, ...]
    """Files and overrides."""
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


def planned_scales(scenario: Scenario, *, simulates: bool) -> Iterator[PlannedScale]:
    """The plan for each number of GPUs; a UserError where the model's shape is not known."""
    files, overrides = split_words(scenario.words)
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
    """What `check` finds where packages are installed; a UserError for a file that is unreadable."""
    machine = _machine(hardware)
    report = check(files, words, machine=machine, installed=lambda _: True, starts_a_run=False)
    if not report.is_whole:
        report.require_sound()
    return report


def _lengths(config: RunConfig, scenario: Scenario) -> Lengths:
    prompt, answer = scenario.prompt_tokens, scenario.response_tokens
    return Lengths(
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
    if file is not None:
        found = _read(file)
    else:
        found = report.plan.shape or published_shape(model.path)
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


# The plan as text.


def _one_scale(scale: PlannedScale, scenario: Scenario, names: str) -> Iterator[str]:
    """Every phase of one number of GPUs."""
    nodes = -(-scale.gpus // scenario.hardware.gpus_per_node)
    where = f"{scale.gpus} {scenario.hardware.name} in {nodes} node{'s' if nodes > 1 else ''}"
    batch, step = scale.report.plan.batch, scale.step
    kind = "A plan" if step is None else "A simulated step"
    yield f"{kind} of {printable(names)} on {where}"
    yield (
        f"  {scale.shape.parameters() / 1e9:.2f}B weights; {batch.prompts} prompts x "
        f"{batch.samples_per_prompt} samples, {batch.optimizer_steps} optimizer steps"
    )
    if step is None:
        for phase in scale.memory.phases:
            yield f"  {phase.name:12s} {phase.total / _GIB:7.1f} GiB"
    else:
        yield from _step_lines(step, scale.report.plan.where.replicas)
    yield f"  {_verdict(scale.memory)}"


def _step_lines(step: Simulation, copies: int) -> Iterator[str]:
    head = ("phase", "seconds", "share", "sent GiB", "peak GiB", "bound by")
    yield "  {:12s} {:>9s} {:>7s} {:>9s} {:>9s}  {}".format(*head)
    for phase in step.phases:
        cost, memory = phase.cost, phase.memory_bytes
        peak = "" if memory is None else f"{memory / _GIB:.1f}"
        yield (
            f"  {phase.name:12s} {cost.seconds:9.2f} {cost.seconds / step.seconds:7.1%} "
            f"{cost.sent / _GIB:9.1f} {peak:>9s}  {cost.bound}"
        )
    if step.hidden_s:
        yield f"  {'at once':12s} {-step.hidden_s:9.2f} {-step.hidden_s / step.seconds:7.1%}"
    yield f"  {'step':12s} {step.seconds:9.2f}"
    yield (
        f"  {step.tokens_per_second:,.0f} tokens/s per GPU; {copies} copies of the engine, "
        f"{step.rows_at_once} sequences at once on each"
    )


def _verdict(memory: MemoryPlan) -> str:
    peak = memory.peak
    verdict = "fits" if memory.fits else "does NOT fit"
    share = 100 * peak.total / memory.device_bytes
    return f"{verdict}: {peak.name} takes {share:.1f} % of {memory.device_bytes / _GIB:.0f} GiB"


def _table(scales: Sequence[PlannedScale]) -> Iterator[str]:
    """A line for each number of GPUs."""
    names = ("GPUs", "step s", "tokens/s/GPU", "generate", "score", "update", "publish", "network")
    yield "  {:>6s} {:>9s} {:>13s} {:>9s} {:>9s} {:>9s} {:>9s} {:>8s}  memory".format(*names)
    for scale in scales:
        step = scale.step
        if step is None:
            wrong = next(p for p in scale.report.problems if p.severity == "error")
            yield f"  {scale.gpus:6d}  refused by {wrong.id}: {printable(wrong.why)}"
            continue
        seconds = {phase.name: phase.cost.seconds for phase in step.phases}
        network = sum(phase.cost.network for phase in step.phases) / step.seconds
        parts = (seconds.get(name, 0.0) for name in ("generate", "score", "update", "publish"))
        yield (
            f"  {scale.gpus:6d} {step.seconds:9.2f} {step.tokens_per_second:13,.0f} "
            + " ".join(f"{part:9.2f}" for part in parts)
            + f" {network:8.1%}  {_verdict(scale.memory)}"
        )


def _origin_lines(hardware: Hardware) -> Iterator[str]:
    """Where the numbers come from."""
    words = {
        "measured": "Measured on one H200",
        "specified": "Specified by the vendor",
        "assumed": "Assumed, not measured",
        "given": "Given",
    }
    for source, title in words.items():
        found = [f"{n} {c.value:.4g}" for n, c in hardware.constants() if c.source == source]
        if found:
            yield f"{title}: {', '.join(found)}"


def _as_data(scale: PlannedScale) -> dict[str, Any]:
    step, problems = scale.step, scale.report.problems
    simulated = None
    if step is not None:
        phases = {
            phase.name: {
                **asdict(phase.cost),
                "seconds": phase.cost.seconds,
                "bound": phase.cost.bound,
                "memory_bytes": phase.memory_bytes,
            }
            for phase in step.phases
        }
        simulated = {
            "phases": phases,
            "hidden_seconds": step.hidden_s,
            "seconds": step.seconds,
            "tokens_per_second_per_gpu": step.tokens_per_second,
            "rows_at_once": step.rows_at_once,
            "notes": step.remarks,
        }
    return {
        "gpus": scale.gpus,
        "problems": [problem.as_json() for problem in problems],
        "model": asdict(scale.shape),
        "memory": {phase.name: phase.parts for phase in scale.memory.phases},
        "fits": scale.memory.fits,
        "step": simulated,
    }


def run_plan(scenario: Scenario, *, simulates: bool, as_json: bool) -> int:
    """Print the plans; 1 where one of them is refused or does not fit."""
    scales = list(planned_scales(scenario, simulates=simulates))
    is_sound = all(scale.report.is_sound and scale.memory.fits for scale in scales)
    if as_json:
        constants = {name: asdict(one) for name, one in scenario.hardware.constants()}
        page = {"ok": is_sound, "plans": [_as_data(scale) for scale in scales]}
        page |= {"constants": constants} if simulates else {}
        typer.echo(json.dumps(without_odd_values(page), indent=2, allow_nan=False))
        return 0 if is_sound else 1
    names = ", ".join(str(file) for file in split_words(scenario.words)[0]) or "the command line"
    for line in _lines(scales, scenario, names, simulates=simulates):
        typer.echo(line)
    return 0 if is_sound else 1


def _lines(
    scales: Sequence[PlannedScale], scenario: Scenario, names: str, *, simulates: bool
) -> Iterator[str]:
    wrong = next((scale for scale in scales if scale.report.problems), None)
    if wrong is not None:
        yield from problem_lines(wrong.report, [names])
        yield ""
    done = [scale for scale in scales if scale.step is not None or not simulates]
    if simulates and len(scales) > 1:
        yield f"Simulated steps of {printable(names)} on {scenario.hardware.name}"
        yield from _table(scales)
    else:
        for scale in done:
            yield from _one_scale(scale, scenario, names)
    steps = [scale.step for scale in scales if scale.step is not None]
    if steps:
        yield from _origin_lines(scenario.hardware)
    for remark in dict.fromkeys(remark for step in steps for remark in step.remarks):
        yield f"Note: {remark}"


# The options of `luyen plan`.

Config: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        help="YAML files, the later over the earlier, then key=value overrides.",
        metavar="CONFIG... [KEY=VALUE]...",
    ),
]
Simulate: TypeAlias = Annotated[
    bool, typer.Option("--simulate", help="Time of every phase too, from constants of an H200.")
]
Gpus: TypeAlias = Annotated[
    str | None, typer.Option(help="Numbers of GPUs to plan for, such as 8,64; default: as written.")
]
ScaleBatch: TypeAlias = Annotated[
    bool, typer.Option("--scale-batch", help="Batches grow with GPUs, from the first number on.")
]
PromptTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Mean tokens of a prompt; default: data.max_prompt_length.")
]
ResponseTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Mean tokens of an answer; default: data.max_response_length.")
]
ValRows: TypeAlias = Annotated[int, typer.Option(help="Rows of a validation.", min=0)]
ModelFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A config.json with the sizes of the model.")
]
Given: TypeAlias = Annotated[
    list[str] | None, typer.Option("--constant", help="NAME=VALUE in place of a constant.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def _numbers(text: str | None) -> tuple[int, ...]:
    """The numbers of GPUs, smallest first."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        why, fix = "numbers above 0 are due", "write them as in 8,64,256"
        raise UserError("--gpus", text, why, fix)
    return tuple(sorted({int(word) for word in words}))


def _constants(given: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in given:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            why, fix = "a number is due", "write NAME=VALUE, such as link_share=0.6"
            raise UserError("--constant", word, why, fix) from error
    return found


def plan(
    config: Config,
    simulate: Simulate = False,
    gpus: Gpus = None,
    scale_batch: ScaleBatch = False,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    val_rows: ValRows = 0,
    model_config: ModelFile = None,
    constant: Given = None,
    as_json: AsJson = False,
) -> None:
    """Plan a configuration for GPUs that need not be here: memory, and by simulation time.

    Exit code 1 where a configuration is refused or does not fit. Nothing is written.
    """
    scenario = Scenario(
        words=tuple(config),
        gpus=_numbers(gpus),
        scales_batch=scale_batch,
        hardware=H200.with_values(_constants(constant or [])),
        model_config=model_config,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        val_rows=val_rows,
    )
    raise typer.Exit(run_plan(scenario, simulates=simulate, as_json=as_json))
