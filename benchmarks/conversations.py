"""The prefix cache: engine time of conversations, turn by turn, with and without it.

    python benchmarks/conversations.py    # 8 turns of 256 tokens, results of 512
    python benchmarks/conversations.py --device cuda --model qwen2.5-1.5b --talks 64
    python benchmarks/conversations.py --recipe --steps 4    # recipes/tool_calling.yaml

Both sides have the same random weights and take turns. A conversation begins with a result of the
tool's length; each turn generates `new` tokens, and the next prompt is all of that and another
result. Answers of both sides are compared to the bit. Seconds are those of the engine: of its
processor on a CPU, which a busy machine hardly lengthens, of the clock on a GPU. Passes that read
prompts and passes that only generate are counted apart.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luyen.base.process_setup import prepare_process

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes/tool_calling.yaml"
SIDES = {"without": False, "with": True}


@dataclass(slots=True)
class Seconds:
    """What an engine took."""

    reading: float = 0.0
    generating: float = 0.0

    @property
    def whole(self) -> float:
        """Both."""
        return self.reading + self.generating


class Stopwatch:
    """Times every pass of an engine; a pass that began prompts counts as reading."""

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        self.seconds = Seconds()
        self._engine, self._clock = engine, clock
        self._advance, engine.advance = engine.advance, self.advance

    def advance(self) -> list[Any]:
        """One pass of the engine."""
        has_new = bool(self._waiting())
        start = self._clock()
        found = self._advance()
        passed = self._clock() - start
        if has_new:
            self.seconds.reading += passed
        else:
            self.seconds.generating += passed
        return found

    def _waiting(self) -> Any:
        scheduler = getattr(self._engine, "_scheduler", None)
        return scheduler.waiting if scheduler is not None else self._engine._waiting


def clock_of(device: str) -> Callable[[], float]:
    """Processor seconds, or those of the clock once a GPU is done."""
    if device == "cpu":
        return time.process_time
    import torch

    def seconds() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return seconds


def play(words: argparse.Namespace, is_cached: bool) -> tuple[list[Seconds], list[Any]]:
    """Seconds of each turn, and all answers."""
    import torch

    from luyen.base.seeds import derive_key
    from luyen.config.schema.actor_rollout_ref import MultiTurnConfig, RolloutConfig
    from luyen.models.random_policy import shaped_policy
    from luyen.rollout.engines import native
    from luyen.rollout.protocol import Request, Sampling, generate

    policy = shaped_policy(words.model, dtype=getattr(torch, words.dtype), device=words.device)
    longest = words.turns * (words.new + words.result)
    rollout = RolloutConfig(
        max_num_seqs=words.talks,
        max_num_batched_tokens=max(8192, longest),
        gpu_memory_utilization=0.5,
        enable_prefix_caching=is_cached,
        multi_turn=MultiTurnConfig(enable=True),
    )
    engine: Any = native(policy, rollout, longest=longest, decode=lambda _: "")
    watch = Stopwatch(engine, clock_of(words.device))
    sampling = Sampling(max_new_tokens=words.new, ignore_stop=True)
    vocabulary = policy.head.vocabulary
    said: list[tuple[int, ...]] = [()] * words.talks
    turns: list[Seconds] = []
    answers: list[Any] = []
    for turn in range(words.turns):
        requests: list[Request] = []
        for i, before in enumerate(said):
            places = range(words.result)
            result = tuple((97 * i + 31 * j + 7 * turn) % vocabulary for j in places)
            key = derive_key(0, "talk", i, turn)
            name = f"{turn}/{i}"
            requests.append(
                Request(id=name, tokens=(*before, *result), keys=(key,), sampling=sampling)
            )
        watch.seconds = Seconds()
        found = generate(engine, requests)
        turns.append(watch.seconds)
        said = [(*one.tokens, *found[one.id, 0].tokens) for one in requests]
        answers += found.values()
    print(f"  cache: {engine.cache_stats()}" if is_cached else "", end="\n" if is_cached else "")
    return turns, answers


def conversations(words: argparse.Namespace) -> None:
    """Print a line for each turn, and the totals."""
    times: dict[str, list[Seconds]] = {}
    answers: dict[str, list[Any]] = {}
    for name, is_cached in SIDES.items():
        times[name], answers[name] = play(words, is_cached)
    print("turn  prompt  without: read  generate   with: read  generate")
    for turn, (plain, cached) in enumerate(zip(*times.values(), strict=True)):
        prompt = words.result + turn * (words.new + words.result)
        print(
            f"{turn + 1:4d}  {prompt:6d}  {plain.reading:13.2f}  {plain.generating:8.2f}"
            f"  {cached.reading:11.2f}  {cached.generating:8.2f}"
        )
    plain, cached = (sum(one.whole for one in some) for some in times.values())
    is_same = answers["without"] == answers["with"]
    print(f"engine {plain:.1f} s without, {cached:.1f} s with: {cached / plain:.0%}")
    print(f"answers and log-probabilities equal to the bit: {is_same}")


def train(folder: Path, steps: int, is_cached: bool) -> tuple[Seconds, list[str]]:
    """Engine seconds of the recipe's generation, and the digests of the run."""
    from luyen.base.digests import read_digests
    from luyen.config.check import check
    from luyen.train.loop import train_online
    from luyen.train.start import prepare_online

    report = check(
        [RECIPE],
        [
            f"actor_rollout_ref.rollout.enable_prefix_caching={str(is_cached).lower()}",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "data.val_files=[]",
            "trainer.test_freq=-1",
            "trainer.logger=jsonl",
            f"trainer.default_local_dir={folder}",
        ],
    )
    assert report.is_sound, report.problems
    run = prepare_online(report)
    rollout: Any = run.roles.rollout
    watch = Stopwatch(rollout.engine, time.process_time)
    try:
        train_online(run)
        if is_cached:
            print(f"  cache: {rollout.engine.cache_stats()}")
    finally:
        for part in (run.recorder, run.reward, run.roles):
            part.close()
    found = next(folder.rglob("digests.jsonl"))
    return watch.seconds, [one.chain for one in read_digests(found)]


def recipe(words: argparse.Namespace) -> None:
    """Compare generation of the tool recipe; both runs must leave the same digests."""
    times: dict[str, Seconds] = {}
    digests: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, is_cached in SIDES.items():
            times[name], digests[name] = train(Path(folder) / name, words.steps, is_cached)
    for name, seconds in times.items():
        print(f"{name:8s} reading {seconds.reading:.2f} s, generating {seconds.generating:.2f} s")
    plain, cached = times.values()
    print(f"generation {plain.whole / cached.whole:.2f} times as fast with the cache")
    print(f"same digests: {digests['without'] == digests['with']}")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--talks", type=int, default=4, help="conversations at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--result", type=int, default=512)
    parser.add_argument("--recipe", action="store_true", help="the tool recipe instead")
    parser.add_argument("--steps", type=int, default=4)
    words = parser.parse_args()
    prepare_process()
    import torch

    torch.set_num_threads(1)
    if words.recipe:
        recipe(words)
    else:
        conversations(words)


if __name__ == "__main__":
    main()
