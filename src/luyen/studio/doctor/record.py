"""The record of a run as rules read it: metric series, rollouts, unreadable files.

Unreadable files are recorded and skipped, so that rules can still check the rest of a damaged run.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, final

from luyen.base.digests import read_digests, without_checksum
from luyen.base.errors import UserError
from luyen.base.files import read_json
from luyen.base.records import Source, reaches
from luyen.base.rundir import RunDirectory, step_of
from luyen.checkpoint.store import read_manifest
from luyen.config.catalog import ADV_ESTIMATORS
from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.model_folder.config_json import read_shape
from luyen.config.plan import needs_critic
from luyen.config.schema.run import RunConfig
from luyen.studio.doctor.vocabulary import Vocabulary, read_vocabulary
from luyen.studio.runs import MissingPart, missing_parts
from luyen.telemetry.metrics import StepMetrics, read_metrics, series
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts

# A metric over the steps of a run, and medians of its first and last values.

WINDOW = 5
"""Values a median is taken over: robust against two outliers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """A metric at the steps that have it.

    Example:
        >>> MetricSeries(steps=(1, 2, 3), values=(0.1, 9.0, 0.2)).end()
        0.2
    """

    steps: tuple[int, ...]
    """Steps, in order."""
    values: tuple[float, ...]
    """The value at each; all are finite."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def has_end(self) -> bool:
        """Whether there are enough values for `end`."""
        return len(self) >= WINDOW

    @property
    def has_both_ends(self) -> bool:
        """Whether there are enough values to compare `start` and `end`."""
        return len(self) >= 2 * WINDOW

    def start(self) -> float:
        """Median of the first values."""
        return median(self.values[:WINDOW])

    def end(self) -> float:
        """Median of the latest values."""
        return median(self.values[-WINDOW:])

    @property
    def last_steps(self) -> tuple[int, ...]:
        """The steps that `end` looks at."""
        return self.steps[-WINDOW:]


_T = TypeVar("_T")
_DAMAGE = (UserError, OSError, ValueError, LookupError, TypeError, AssertionError)
"""Errors that reading a damaged file may raise; any other error is a bug."""
RECENT, EARLIER = 4, 4
"""Steps whose rollouts are read: the latest in a row, and some spread over the run before them."""
FEWEST, MOST, TOKENS = 64, 512, 200_000
"""Rollouts read of a step, the first ones: as many as hold so many tokens at their longest. That is
enough for a share, and seconds for a run of any size."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A file that could not be read.

    Example:
        >>> UnreadableFile(file="metrics.jsonl", why="line 3 is damaged").file
        'metrics.jsonl'
    """

    file: str
    """Path inside the run directory."""
    why: str
    """What is wrong with it."""


@final
class RunRecord:
    """Everything a rule may read."""

    def __init__(self, directory: RunDirectory) -> None:
        """Read metrics and configuration; a UserError only where there is no run."""
        self.directory = directory
        self.unread: list[UnreadableFile] = []
        self.manifest: dict[str, Any] = directory.read_manifest()
        self.config = self._try(directory.config, self._read_config, RunConfig(), is_demanded=True)
        lines: list[StepMetrics] = []
        if directory.metrics.is_file():  # a run that just began has none
            lines = self._try(directory.metrics, read_metrics, lines)
        self.lines = tuple(lines)
        """Every line of metrics, the validation before the first step included."""
        self.steps = tuple(line for line in lines if line.step > 0)
        """The lines of training steps."""

    def series(self, name: str) -> MetricSeries:
        """A metric over the training steps, where it is finite."""
        steps, values = series(list(self.steps), name)
        pairs = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        return MetricSeries(steps=tuple(s for s, _ in pairs), values=tuple(v for _, v in pairs))

    def names(self) -> list[str]:
        """Every metric of the run."""
        return sorted({name for line in self.steps for name in line.values})

    @cached_property
    def rollouts(self) -> dict[int, list[RecordedRollout]]:
        """Rollouts of the steps that are looked at, by step; the latest in a row, some before."""
        found: dict[int, list[RecordedRollout]] = {}
        data = self.config.data
        longest = data.max_prompt_length + data.max_response_length
        limit = max(FEWEST, min(MOST, TOKENS // longest))
        for step in _spread(self._done("rollouts")):
            path = self.directory.rollouts(step)
            read = self._try(path, lambda p, s=step: read_rollouts(p, limit=limit, step=s), None)
            if read:
                found[step] = read
        return found

    @cached_property
    def checkpoints(self) -> dict[int, dict[str, Any]]:
        """The manifest of every checkpoint, by step."""
        found: dict[int, dict[str, Any]] = {}
        for step in self._steps_in("checkpoints"):
            folder = self.directory.checkpoint(step)
            page = self._try(
                folder / "manifest.json",
                lambda path: read_manifest(path.parent),
                None,
                is_demanded=folder.is_dir(),
            )
            if page is not None:
                found[step] = page
        return found

    @cached_property
    def worst_tokens(self) -> list[dict[str, Any]]:
        """Tokens about which sampler and trainer disagreed most, in the latest step with any."""
        steps = self._done("parity")
        if not steps:
            return []
        path = self.directory.parity(steps[-1])
        return self._try(
            path, lambda p: without_checksum(read_json(p), p, is_demanded=True)["tokens"], []
        )

    @cached_property
    def removed(self) -> list[UnreadableFile]:
        """Missing files whose absence is no damage: users remove them to free space."""
        gone = [one for one in self._missing if not one.is_damage]
        return [UnreadableFile(file=self._name(one.path), why=one.why) for one in gone]

    @cached_property
    def _missing(self) -> list[MissingPart]:
        return missing_parts(self.directory)

    @cached_property
    def _unused_files(self) -> None:
        """Read the files that no rule uses, to find damage, and list missing parts."""
        run = self.directory
        if run.digests.is_file():
            self._try(run.digests, read_digests, [])
        self._try(run.provenance, lambda _: run.read_provenance(), {}, is_demanded=True)
        self._try(run.resumptions, lambda _: run.read_resumptions(), [], is_demanded=True)
        for step in _spread(self._steps_in("validation")):
            path = run.rollouts(step, validation=True)
            self._try(path, lambda p: read_rollouts(p, limit=1), [])
        damage = [one for one in self._missing if one.is_damage]
        self.unread += [UnreadableFile(file=self._name(one.path), why=one.why) for one in damage]

    def damaged(self) -> list[UnreadableFile]:
        """Every file that cannot be read, or lacks what it must have held; of long runs a part."""
        # Reading appends damaged files to `unread`.
        _ = self.rollouts, self.checkpoints, self.worst_tokens, self._unused_files
        return self.unread

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of the tokenizer; None if its file is not on this machine."""
        return read_vocabulary(self.config.actor_rollout_ref.model)

    @cached_property
    def embedding_rows(self) -> int | None:
        """Ids that the model has a row for; None where its config is not on this machine."""
        shape = read_shape(self.config.actor_rollout_ref.model)
        return None if shape is None else shape.vocab

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return needs_critic(self.config, ADV_ESTIMATORS.get(self.config.algorithm.adv_estimator))

    def _read_config(self, path: Path) -> RunConfig:
        self._try(path, lambda _: self.directory.read_config(), "")
        tree = load([path], [], reads_environment=False)
        parsed = parse(tree)
        wrong = [p for p in (*tree.problems, *parsed.problems) if p.severity == "error"]
        if wrong:  # invalid keys have their defaults, all other keys the values of the run
            self.unread.append(
                UnreadableFile(file=path.name, why=f"{wrong[0].field}: {wrong[0].why}")
            )
        return parsed.config

    def _steps_in(self, folder: str) -> list[int]:
        place = self.directory.root / folder
        names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def _done(self, folder: str) -> list[int]:
        """Steps in a folder, without those after the step that the run was last resumed from.

        A step in progress writes its rollouts before its metrics.
        """
        steps = self._steps_in(folder)
        return [s for s in steps if s <= self.lines[-1].step + 1] if self.lines else steps

    def _try(
        self, path: Path, read: Callable[[Path], _T], otherwise: _T, *, is_demanded: bool = False
    ) -> _T:
        try:
            return read(path)
        except _DAMAGE as error:
            # A live run may just have replaced or removed the file: that is no damage.
            if path.exists() or is_demanded:
                why = error.why if isinstance(error, UserError) else repr(error)
                self.unread.append(UnreadableFile(file=self._name(path), why=why))
            return otherwise

    def _name(self, path: Path) -> str:
        return path.relative_to(self.directory.root).as_posix()


def _spread(steps: list[int]) -> list[int]:
    """The latest consecutive steps, and some earlier ones at equal distances.

    Example:
        >>> _spread(list(range(1, 21)))
        [1, 5, 9, 12, 17, 18, 19, 20]
    """
    before, recent = steps[:-RECENT], steps[-RECENT:]
    if len(before) <= EARLIER:
        return before + recent
    places = [round(i * (len(before) - 1) / EARLIER) for i in range(EARLIER)]
    return [before[place] for place in places] + recent


def read_run(root: Path | str) -> RunRecord:
    """The record of a run; a UserError where no run was begun."""
    return RunRecord(RunDirectory.open(root))


# Helpers on recorded rollouts, shared by several rules.


def name_of(recorded: RecordedRollout) -> str:
    """How a finding names a rollout: group and sample."""
    return f"{recorded.rollout.group}/{recorded.rollout.sample}"


def used_tokens(recorded: RecordedRollout) -> Iterator[tuple[Source, float | None]]:
    """Origin and advantage of every token of every branch; nothing where the step left it out."""
    if recorded.advantages is None:
        return
    rows = (*recorded.earlier, recorded.advantages)
    for branch, row in zip(recorded.rollout.branches, rows, strict=True):
        yield from zip(branch.sources, row, strict=True)


def prompt_of(recorded: RecordedRollout) -> tuple[int, ...]:
    """Tokens before the first one that was sampled in the oldest branch."""
    first = recorded.rollout.branches[0]
    sampled = (i for i, source in enumerate(first.sources) if source == Source.SAMPLED)
    return first.tokens[: next(sampled, len(first.tokens))]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGroups:
    """How many groups of the latest steps are solved, by the reward before any KL term.

    Example:
        >>> SolvedGroups(groups=4, all=1, none=3).none_share
        0.75
    """

    groups: int
    """Scored groups."""
    all: int
    """Those whose samples all reach reward 1."""
    none: int
    """Those without a sample that does."""

    @property
    def all_share(self) -> float:
        """Share of groups that are solved; 0 without groups."""
        return self.all / self.groups if self.groups else 0.0

    @property
    def none_share(self) -> float:
        """Share of groups without a solution; 0 without groups."""
        return self.none / self.groups if self.groups else 0.0


def solved_groups(record: RunRecord) -> SolvedGroups:
    """Count the groups of the latest steps by how many of their samples reach reward 1."""
    groups: dict[str, list[bool]] = {}
    for step in list(record.rollouts)[-RECENT:]:
        for recorded in record.rollouts[step]:
            score = recorded.rollout.score
            if score is not None and score.value is not None:
                groups.setdefault(str(recorded.rollout.group), []).append(reaches(score.value, 1.0))
    return SolvedGroups(
        groups=len(groups),
        all=sum(all(found) for found in groups.values()),
        none=sum(not any(found) for found in groups.values()),
    )
