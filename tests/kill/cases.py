"""Which runs are killed where, and whether what goes on is what an uninterrupted run does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from luyen.base.digests import read_digests
from tests.kill.offline import OFFLINE, OFFLINE_POINTS, is_passed
from tests.kill.points import POINTS
from tests.kill.remote import Loss, is_loaded, load
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
_OFFLINE = "offline"
_ONLINE = (ROLLOUT, "algorithm.", "reward.", f"{ACTOR}.ppo_mini_batch_size")
"""Keys that offline runs do not read."""
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
    staleness: int = 0

    def __str__(self) -> str:
        ahead = f", staleness {self.staleness}" if self.staleness else ""
        return f"{self.shape}, {self.algorithm}{ahead}: {self.point} (call {self.call})"


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


def offline_cases() -> list[Case]:
    """Every kind of offline run, killed everywhere."""
    return [
        Case(shape=_OFFLINE, algorithm=run, point=name, call=call)
        for run in OFFLINE
        for name, point in OFFLINE_POINTS.items()
        if is_passed(run, name)
        for call in point.calls
    ]


def quick_offline_cases() -> list[Case]:
    """Every point once, over changing runs."""
    runs = list(OFFLINE)
    found: list[Case] = []
    for index, (name, point) in enumerate(OFFLINE_POINTS.items()):
        fitting = [run for run in runs if is_passed(run, name)]
        if name.startswith("the reference"):
            fitting = [run for run in fitting if "precomputed" in run]
        run, call = fitting[index % len(fitting)], point.calls[index % len(point.calls)]
        found.append(Case(shape=_OFFLINE, algorithm=run, point=name, call=call))
    return found


def ahead_cases(staleness: Sequence[int]) -> list[Case]:
    """Conversations whose rollouts are generated ahead, killed everywhere."""
    return [
        Case(shape="tool-calling", algorithm="GRPO", point=name, call=call, staleness=ahead)
        for ahead in staleness
        for name, point in POINTS.items()
        for call in point.calls
    ]


def staleness_words(staleness: int) -> tuple[str, ...]:
    """What lets generation run ahead of training."""
    if staleness == 0:
        return ()
    return (f"trainer.max_staleness={staleness}", "algorithm.rollout_correction.rollout_is=token")


@final
@dataclass(frozen=True, slots=True)
class Killing:
    """Carries cases out, with one uninterrupted run of each kind to compare with."""

    zygote: Zygote
    folder: Path
    words: tuple[str, ...] = ()
    """What all runs have besides: where they run."""
    whole: dict[tuple[str, str, int], list[str]] = field(
        default_factory=dict[tuple[str, str, int], list[str]]
    )

    def chain(self, case: Case) -> list[str]:
        """The chains of an uninterrupted run."""
        kind = (case.shape, case.algorithm, case.staleness)
        if kind not in self.whole:
            place = self.folder / "-".join(map(str, kind))
            place.mkdir()
            status = self._run(place, case)
            assert status == 0, log_of(place)
            self.whole[kind] = chains(place)
        return self.whole[kind]

    def carry_out(self, case: Case, place: Path) -> None:
        """Kill and go on; AssertionError when anything is not as it would have been."""
        expected = self.chain(case)
        first = self._run(place, case, point=case.point)
        assert first == KILLED, f"it was not killed ({first}): {log_of(place)}"
        unknown = unknown_calls(place)
        again = self._run(place, case)
        assert again == 0, log_of(place)
        demand_whole(place, expected, unknown)

    def outlive(self, case: Case, place: Path, *, loss: Loss = "process") -> str:
        """Lose a process of it elsewhere, or its node: the run itself goes on; what it said."""
        expected = self.chain(case)
        load(case.point, case.call, loss=loss)
        status = self._run(place, case)
        assert not is_loaded(), "nobody came by the point"
        assert status == 0, log_of(place)
        # What draws ahead calls tools at any time, also when ranks are lost: such calls are cut off
        # with nothing known of them, and nobody can look at the journal at that moment.
        unknown = repeated_calls(place) if case.staleness else set[str]()
        demand_whole(place, expected, unknown)
        return log_of(place)

    def _run(self, place: Path, case: Case, *, point: str | None = None) -> int:
        words = [*TINY, *_EVERY]
        if case.shape == _OFFLINE:
            words = [word for word in words if not word.startswith(_ONLINE)]
            words += OFFLINE[case.algorithm]
        else:
            words = [*TINY, *SHAPES[case.shape], *ALGORITHMS[case.algorithm], *_EVERY]
        words += [*staleness_words(case.staleness), *self.words]
        return self.zygote.run(
            [*words, f"trainer.default_local_dir={place}"],
            point=point,
            call=case.call,
            log=place / "log",
            calls=place / "calls",
        )


def demand_whole(place: Path, expected: list[str], unknown: set[str]) -> None:
    """An AssertionError unless a run that is over did what an uninterrupted one does."""
    assert chains(place) == expected, "the run that went on did something else"
    journal = place / "luyen" / "run" / "journal"
    left = [path.name for path in journal.iterdir()] if journal.is_dir() else []
    assert left == [], f"a finished run keeps its journal: {left}"
    repeated = repeated_calls(place) - unknown
    assert not repeated, f"calls whose result was known were made again: {repeated}"


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
