"""Which runs are killed where, and whether what goes on is what an uninterrupted run does."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from luyen.base.digests import read_digests
from tests.kill.points import POINTS
from tests.kill.zygote import Zygote
from tests.runs import ACTOR, CHATTY, MODEL, ROLLOUT, TINY, TURNS

KILLED = -9
_TOOLS = Path(__file__).parent / "counted_tools.py"
_EVERY = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.max_ckpt_to_keep=1",
    "data.val_files=arithmetic://sum?digits=1&split=held-out",
    "data.val_max_samples=3",
    f"{ACTOR}.ppo_mini_batch_size=2",
)
SHAPES = {"single-turn": (), "tool-calling": (*CHATTY, f"{TURNS}.function_tool_path={_TOOLS}")}
ALGORITHMS = {
    "GRPO": (),
    "PPO": ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3", f"{ROLLOUT}.n=2"),
    "LoRA": (f"{MODEL}.lora_rank=4",),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kill of one run."""

    shape: str
    algorithm: str
    point: str
    call: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.algorithm}: {self.point} (call {self.call})"


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [
        Case(shape=shape, algorithm=algorithm, point=name, call=call)
        for shape in SHAPES
        for algorithm in ALGORITHMS
        for name, point in POINTS.items()
        for call in point.calls
        if shape == "tool-calling" or not point.tools_only
    ]


def quick_cases() -> list[Case]:
    """Every point once, over changing runs."""
    found: dict[str, Case] = {}
    kinds = [(shape, algorithm) for algorithm in ALGORITHMS for shape in SHAPES]
    for index, (name, point) in enumerate(POINTS.items()):
        shape, algorithm = kinds[index % len(kinds)]
        shape = "tool-calling" if point.tools_only else shape
        call = point.calls[index % len(point.calls)]
        found[name] = Case(shape=shape, algorithm=algorithm, point=name, call=call)
    return list(found.values())


@final
@dataclass(frozen=True, slots=True)
class Killing:
    """Carries cases out, with one uninterrupted run of each kind to compare with."""

    zygote: Zygote
    folder: Path
    whole: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )

    def chain(self, shape: str, algorithm: str) -> list[str]:
        """The chains of an uninterrupted run."""
        if (shape, algorithm) not in self.whole:
            place = self.folder / f"{shape}-{algorithm}"
            place.mkdir()
            status = self._run(place, shape, algorithm)
            assert status == 0, (place / "log").read_text()[-4000:]
            self.whole[shape, algorithm] = chains(place)
        return self.whole[shape, algorithm]

    def carry_out(self, case: Case, place: Path) -> None:
        """Kill and go on; AssertionError when anything is not as it would have been."""
        expected = self.chain(case.shape, case.algorithm)
        first = self._run(place, case.shape, case.algorithm, point=case.point, call=case.call)
        assert first == KILLED, f"it was not killed ({first}): {log_of(place)}"
        unknown = unknown_calls(place)
        again = self._run(place, case.shape, case.algorithm)
        assert again == 0, log_of(place)
        assert chains(place) == expected, "the run that went on did something else"
        left = [path.name for path in (place / "luyen" / "run" / "journal").iterdir()]
        assert left == [], f"a finished run keeps its journal: {left}"
        repeated = repeated_calls(place) - unknown
        assert not repeated, f"calls whose result was known were made again: {repeated}"

    def _run(
        self, place: Path, shape: str, algorithm: str, *, point: str | None = None, call: int = 1
    ) -> int:
        words = [*TINY, *SHAPES[shape], *ALGORITHMS[algorithm], *_EVERY]
        return self.zygote.run(
            [*words, f"trainer.default_local_dir={place}"],
            point=point,
            call=call,
            log=place / "log",
            calls=place / "calls",
        )


def chains(place: Path) -> list[str]:
    """The chain after every step."""
    return [line.chain for line in read_digests(place / "luyen" / "run" / "digests.jsonl")]


def repeated_calls(place: Path) -> set[str]:
    """Keys of tool calls that were executed more than once."""
    file = place / "calls"
    keys = file.read_text().split() if file.is_file() else []
    return {key for key in keys if keys.count(key) > 1}


def unknown_calls(place: Path) -> set[str]:
    """Keys of tool calls that were begun and of whose end the journal says nothing."""
    files = (place / "luyen" / "run").glob("journal/*.jsonl")
    lines = [
        json.loads(line)
        for file in files
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    kinds = {
        kind: {e["key"] for e in lines if e.get("kind") == kind} for kind in ("intent", "result")
    }
    return kinds["intent"] - kinds["result"]


def log_of(place: Path) -> str:
    """The end of what the processes said."""
    return (place / "log").read_text()[-4000:]
