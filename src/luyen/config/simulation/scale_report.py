"""Planned and simulated scales as text and as data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from luyen.base.errors import printable
from luyen.config.memory import MemoryPlan
from luyen.config.simulation.cost import Cost
from luyen.config.simulation.hardware import Hardware
from luyen.config.simulation.scales import PlannedScale, Scenario
from luyen.config.simulation.step import Simulation

_GIB = 1024**3


def _one_scale(scale: PlannedScale, scenario: Scenario, names: str) -> Iterator[str]:
    """Every phase of one number of GPUs."""
    nodes = -(-scale.gpus // scenario.hardware.gpus_per_node)
    where = f"{scale.gpus} {scenario.hardware.name} in {nodes} node{'s' if nodes > 1 else ''}"
    batch, step = scale.report.plan.batch, scale.step
    updates = f"{batch.optimizer_steps} optimizer step{'s' if batch.optimizer_steps > 1 else ''}"
    kind = "A plan" if step is None else "A simulated step"
    yield f"{kind} of {printable(names)} on {where}"
    yield (
        f"  {scale.shape.parameters() / 1e9:.2f}B weights; {batch.prompts} prompts x "
        f"{batch.samples_per_prompt} samples, {updates}"
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
        memory = phase.memory_bytes
        peak = "" if memory is None else f"{memory / _GIB:.1f}"
        yield _cost_line(phase.name, phase.cost, whole=step.seconds, peak=peak)
    if step.hidden_s:
        yield f"  {'at once':12s} {-step.hidden_s:9.2f} {-step.hidden_s / step.seconds:7.1%}"
    yield f"  {'step':12s} {step.seconds:9.2f}"
    yield (
        f"  {step.tokens_per_second:,.0f} tokens/s per GPU; {copies} copies of the engine, "
        f"{step.rows_at_once} sequences at once on each"
    )


def _cost_line(name: str, cost: Cost, *, whole: float, peak: str) -> str:
    share, sent = cost.seconds / whole, cost.sent / _GIB
    return f"  {name:12s} {cost.seconds:9.2f} {share:7.1%} {sent:9.1f} {peak:>9s}  {cost.bound}"


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


def _scale_data(scale: PlannedScale) -> dict[str, Any]:
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


def scale_lines(
    scales: Sequence[PlannedScale], scenario: Scenario, *, simulates: bool
) -> Iterator[str]:
    """Every phase of a single scale, or a table of several; constants and notes."""
    names = ", ".join(str(file) for file in scenario.files) or "the command line"
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


def scales_data(
    scales: Sequence[PlannedScale], scenario: Scenario, *, simulates: bool
) -> dict[str, Any]:
    """The same as plain data."""
    constants = {name: asdict(one) for name, one in scenario.hardware.constants()}
    page: dict[str, Any] = {
        "ok": all(scale.is_sound for scale in scales),
        "plans": [_scale_data(scale) for scale in scales],
    }
    return page | ({"constants": constants} if simulates else {})
