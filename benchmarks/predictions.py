"""What `luyen plan --simulate` predicts, against what was measured on one H200.

    python benchmarks/predictions.py

prints the tables of docs/simulate.md. Measured figures are those of docs/benchmarks.md,
the mean where several sessions measured the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.model_folder.config_json import ModelShape
from luyen.config.simulation.cost import GenerationWork, ModelCost, PassWork
from luyen.config.simulation.hardware import H200
from luyen.config.simulation.scales import Scenario, planned_scales, published_shape
from luyen.config.simulation.step import RolloutLengths, Simulation, simulate

GIB = 1024**3
SMOLLM2, QWEN = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
RAGGED = (100, 1024)
FITTED, HELD_OUT, MISSED = "fitted", "held out", "miss"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured figure with its prediction.

    Example:
        >>> Figure(name="a pass", unit="s", measured=2.0, predicted=1.0, use="held out").error
        -0.5
    """

    name: str
    """What was measured."""
    unit: str
    """Of both numbers."""
    measured: float
    """Mean of what the page says."""
    predicted: float
    """By the simulation."""
    use: str
    """fitted: a constant was chosen by it; held out: none was; miss: not what is modelled."""

    @property
    def error(self) -> float:
        """Relative difference of the prediction."""
        return self.predicted / self.measured - 1


def cost(name: str) -> ModelCost:
    """Of a published model on an H200."""
    shape = published_shape(name)
    assert shape is not None
    return ModelCost(shape=shape, hardware=H200)


def decode_seconds(model: ModelCost, work: GenerationWork) -> float:
    """Generation without prompts and first tokens, as `luyen bench rollout` measures it."""
    return model.generation(work).seconds - model.reading(work).seconds


def decode_rate(model: ModelCost, rows: int) -> float:
    """Tokens per second of rows with 896 tokens of prompt and 256 of answer."""
    work = GenerationWork(prompts=rows, prompt=(896, 896), new=(256, 256))
    return rows * 255 / decode_seconds(model, work)


def floor_seconds(shape: ModelShape, work: GenerationWork) -> float:
    """What decoding must move, as `luyen bench` counts it, over the rate of a large copy."""
    lengths = work.lengths()
    steps = sum(new for _, new in lengths) - len(lengths)
    steps_of_all = max(1, round(steps / min(work.rows, len(lengths))))
    contexts = sum((new - 1) * prompt + new * (new - 1) // 2 for prompt, new in lengths)
    moved = steps_of_all * shape.parameters() * 2 + contexts * shape.kv_bytes_per_token(2)
    return (moved + 4 * steps * shape.vocab) / H200.copy_rate.value


def run_of_the_benchmark() -> Simulation:
    """The GRPO step of 32 x 8 answers of 256 + 256 tokens, through the roles of a run."""
    arr = "actor_rollout_ref"
    words = (
        "data.train_files=arithmetic://sum",
        "data.train_batch_size=32",
        "data.max_prompt_length=256",
        "data.max_response_length=256",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cuda",
        f"{arr}.model.path={SMOLLM2}",
        f"{arr}.model.enable_gradient_checkpointing=false",
        f"{arr}.actor.ppo_mini_batch_size=32",
        f"{arr}.actor.ppo_max_token_len_per_gpu=160000",
        f"{arr}.rollout.n=8",
    )
    machine = Machine(cpus=16, ram_bytes=128 * GIB, gpu_bytes=(H200.memory_bytes,))
    report = check([], words, machine=machine)
    plan, shape = report.plan, published_shape(SMOLLM2)
    assert shape is not None
    lengths = RolloutLengths(prompt=256, answer=256)
    return simulate(report.config, shape, plan.batch, plan.where, hardware=H200, lengths=lengths)


def small_figures() -> Iterator[Figure]:
    """The shape of SmolLM2-135M."""
    model = cost(SMOLLM2)
    for rows, measured in ((256, 101.6e3), (1024, 143.2e3)):
        name = f"135M: decode, {rows:,} rows at 1,024 context"
        predicted = decode_rate(model, rows)
        yield Figure(name=name, unit="tokens/s", measured=measured, predicted=predicted, use=FITTED)
    for budget, rate in ((160_000, 67.2e3), (32_768, 65.2e3)):
        work = GenerationWork(prompts=256, prompt=RAGGED, new=RAGGED, pass_tokens=budget)
        tokens = sum(new for _, new in work.lengths())
        yield Figure(
            name=f"135M: nano-vllm's workload, passes of {budget:,}",
            unit="tokens/s",
            measured=rate,
            predicted=tokens / model.generation(work).seconds,
            use=HELD_OUT,
        )
    for budget, seconds, use in (
        (160_000, 0.12, FITTED),
        (65_536, 0.145, HELD_OUT),
        (32_768, 0.165, HELD_OUT),
    ):
        work = GenerationWork(prompts=256, prompt=RAGGED, new=RAGGED, pass_tokens=budget)
        predicted = model.reading(work).seconds
        name = f"135M: its prompts, passes of {budget:,}"
        yield Figure(name=name, unit="s", measured=seconds, predicted=predicted, use=use)
    work = GenerationWork(prompts=1024, prompt=(896, 896), new=(1, 1))
    yield Figure(
        name="135M: 1,024 prompts of 896",
        unit="s",
        measured=0.94,
        predicted=model.reading(work).seconds,
        use=HELD_OUT,
    )
    for new, seconds in ((64, 0.136), (256, 0.425)):
        work = GenerationWork(prompts=32, samples=8, prompt=(256, 256), new=(new, new))
        predicted = model.generation(work).seconds
        name = f"135M: generation, 32 x 8 answers of {new}"
        yield Figure(name=name, unit="s", measured=seconds, predicted=predicted, use=HELD_OUT)


def step_figures() -> Iterator[Figure]:
    """Steps of the 135M shape."""
    run = run_of_the_benchmark()
    seconds = {phase.name: phase.cost.seconds for phase in run.phases}
    alone = seconds["generate"] + seconds["update"]
    for name, measured, predicted, use in (
        ("GRPO step of `luyen bench step`", 0.673, alone, HELD_OUT),
        ("generation through the roles of a run", 0.471, seconds["generate"], HELD_OUT),
        ("GRPO step through the roles of a run", 0.865, run.seconds, FITTED),
        ("the same in the process of TRL", 0.952, run.seconds, HELD_OUT),
        ("update, with batches made of lists", 0.30, seconds["update"], MISSED),
    ):
        yield Figure(
            name=f"135M: {name}", unit="s", measured=measured, predicted=predicted, use=use
        )
    work = GenerationWork(prompts=32, samples=8, prompt=(1024, 1024), new=(128, 128))
    yield Figure(
        name="135M: decode, `deterministic: false`, shared prompts",
        unit="tokens/s",
        measured=131.5e3,
        predicted=256 * 127 / decode_seconds(cost(SMOLLM2), work),
        use=MISSED,
    )


def larger_figures() -> Iterator[Figure]:
    """The shape of Qwen2.5-1.5B."""
    model = cost(QWEN)
    even = GenerationWork(prompts=256, prompt=(896, 896), new=(256, 256))
    ragged = GenerationWork(prompts=1024, prompt=RAGGED, new=RAGGED, rows=256)
    for name, work, measured, use in (
        ("256 even rows", even, 0.53, FITTED),
        ("256 ragged rows", ragged, 0.44, HELD_OUT),
    ):
        predicted = floor_seconds(model.shape, work) / decode_seconds(model, work)
        yield Figure(
            name=f"1.5B: decode, {name}, of the floor",
            unit="",
            measured=measured,
            predicted=predicted,
            use=use,
        )
    tokens = sum(new for _, new in ragged.lengths())
    yield Figure(
        name="1.5B: 1,024 ragged requests, 256 at once",
        unit="tokens/s",
        measured=43.85e3,
        predicted=tokens / model.generation(ragged).seconds,
        use=HELD_OUT,
    )
    # Turns 4 to 8 read 768 new tokens behind 2,048 to 5,120 that are kept.
    work = PassWork(tokens=64 * 768, scored=64, context=(2048 + 5120) / 2 + 384)
    yield Figure(
        name="1.5B: 64 later turns of 768 new tokens read",
        unit="s",
        measured=0.335,
        predicted=model.forward(work).seconds,
        use=FITTED,
    )
    turns = [
        GenerationWork(prompts=64, prompt=(512 + 768 * turn, 512 + 768 * turn), new=(256, 256))
        for turn in range(8)
    ]
    yield Figure(
        name="1.5B: 64 conversations of 8 turns, decoding",
        unit="s",
        measured=8.0,
        predicted=sum(decode_seconds(model, turn) for turn in turns),
        use=HELD_OUT,
    )
    yield Figure(
        name="1.5B: their prompts without the cache, compilation included",
        unit="s",
        measured=21.4,
        predicted=sum(model.reading(turn).seconds for turn in turns),
        use=MISSED,
    )


def figures() -> list[Figure]:
    """All of them, in the order of the table."""
    return [*small_figures(), *step_figures(), *larger_figures()]


def table() -> str:
    """The table in Markdown."""
    lines = ["| figure | measured | predicted | error | |", "|---|---|---|---|---|"]
    for one in figures():
        numbers = (_shown(value, one.unit) for value in (one.measured, one.predicted))
        lines.append(f"| {one.name} | {' | '.join(numbers)} | {one.error:+.0%} | {one.use} |")
    return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    match unit:
        case "tokens/s":
            return f"{value / 1e3:.1f}k tokens/s"
        case "s":
            return f"{value:.3g} s"
        case _:
            return f"{value:.0%}"


RECIPES = Path(__file__).parents[1] / "recipes" / "cluster"
SCALES = {
    "qwen_7b": (8, 64, 256, 1024),
    "qwen_32b": (32, 64, 256, 1024),
    "qwen_30b_a3b": (8, 64, 256, 1024),
    "llama_70b": (128, 256, 512, 1024),
}
"""Recipe -> numbers of GPUs; batches grow from the first one on."""


def scale_table() -> str:
    """Simulated steps of the recipes at several scales, in Markdown."""
    names = ("generate", "score", "update", "publish")
    head = f"| recipe | GPUs | step | tokens/s/GPU | {' | '.join(names)} | peak GiB |"
    lines = [head, "|---" * 9 + "|"]
    for recipe, gpus in SCALES.items():
        files = (RECIPES / f"{recipe}.yaml",)
        scenario = Scenario(files=files, gpus=gpus, scales_batch=True)
        for scale in planned_scales(scenario, simulates=True):
            step = scale.step
            assert step is not None
            seconds = {phase.name: phase.cost.seconds for phase in step.phases}
            parts = " | ".join(f"{seconds[name]:.1f}" for name in names)
            whole = f"{step.seconds:.0f} | {step.tokens_per_second:,.0f}"
            peak = f"{scale.memory.peak.total / GIB:.0f}"
            lines.append(f"| {recipe} | {scale.gpus:,} | {whole} | {parts} | {peak} |")
    return "\n".join(lines)


def constants_table() -> str:
    """Every constant and where it comes from, in Markdown."""
    lines = ["| constant | value | source | |", "|---|---|---|---|"]
    for name, one in H200.constants():
        lines.append(f"| `{name}` | {one.value:.4g} {one.unit} | {one.source} | {one.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), scale_table(), constants_table(), sep="\n\n")
