"""Rollouts of training rows: how they are submitted, their handles, what checkpoints keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, final

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.base.records import GroupId, Prompt
from luyen.config.loader.parse import stored_values
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import ReadyRollouts, RolloutFuture
from luyen.runtime.roles import Roles
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS
from luyen.telemetry.rollout_codec import rollout_of, rollout_tree

# Prompts at their place in the run: the address that every random choice derives from.


def prompt_requests(
    prompts: Sequence[Prompt], *, step: int, first: int, samples: int
) -> list[PromptRequest]:
    """Each prompt at its place of the run."""
    return [
        PromptRequest(
            group=GroupId(step=step, draw=first + i, uid=prompt.uid), prompt=prompt, samples=samples
        )
        for i, prompt in enumerate(prompts)
    ]


ParentDigest: TypeAlias = tuple[str, str | None]
"""The chain when rows were asked for, and the weights where no chain stands for them."""
OpenJournal: TypeAlias = Callable[[int, str, ParentDigest | None], WorkJournal | None]
"""`(step, kind, origin)`: the journal of a step's work of a kind; not begun without an origin."""
BeginJournal: TypeAlias = Callable[[WorkJournal | None, int, str, ParentDigest], None]
"""`(journal, step, kind, origin)`: the origin is known now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """Where rows stand in a run, and what the run was when they were asked for.

    Example:
        >>> BatchSlot(step=3, first=8, rows=(5, 6), version=2, origin=("", None)).rows
        (5, 6)
    """

    step: int
    """The step that they are drawn for."""
    first: int
    """Draws of that step before them."""
    rows: tuple[int, ...]
    """Indices of their prompts."""
    version: int
    """Version of the weights that was the newest then."""
    origin: ParentDigest
    """Chain and weights of then."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "step": self.step,
            "first": self.first,
            "rows": list(self.rows),
            "version": self.version,
            "origin": list(self.origin),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "BatchSlot":
        """What `as_json` gave."""
        chain, weights = tree["origin"]
        return cls(
            step=tree["step"],
            first=tree["first"],
            rows=tuple(tree["rows"]),
            version=tree["version"],
            origin=(chain, weights),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutHandle:
    """Rollouts that were asked for.

    Example:
        >>> place = BatchSlot(step=1, first=0, rows=(), version=0, origin=("", None))
        >>> RolloutHandle(place=place, drawn=ReadyRollouts([]), greedy=None, journal=None).is_done
        True
    """

    place: BatchSlot
    """Where they stand in the run."""
    drawn: RolloutFuture
    """Their groups."""
    greedy: RolloutFuture | None
    """The likeliest answer to each prompt, where the algorithm wants it."""
    journal: WorkJournal | None
    """Where the work of the step is written down."""

    @property
    def is_done(self) -> bool:
        """Whether nobody has to wait for them."""
        return self.drawn.done() and (self.greedy is None or self.greedy.done())

    def needs_other_weights(self, version: int) -> bool:
        """Whether some are in progress, and could not be drawn anew with these weights."""
        return not self.is_done and self.place.version != version

    def as_it_is(self) -> dict[str, Any]:
        """Plain data for a checkpoint; where some are in progress, all are to be drawn anew."""
        return self.as_json() if self.is_done else {**self.place.as_json(), "drawn": None}

    def as_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint, with every rollout; waits for those in progress."""
        drawn = _rollout_trees(self.drawn)
        greedy = None if self.greedy is None else _rollout_trees(self.greedy)
        return {**self.place.as_json(), "drawn": drawn, "greedy": greedy}


@final
class RolloutSubmitter:
    """How a run asks for rollouts of its training rows."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainData,
        roles: Roles,
        sampling: Sampling,
        *,
        has_baselines: bool,
        take_up: OpenJournal,
        begin_work: BeginJournal,
    ) -> None:
        """`take_up` opens the journal of a step, and `begin_work` one that was not begun."""
        self.batch = config.data.train_batch_size
        """Groups of a step."""
        self.roles = roles
        self.take_up = take_up
        self.begin_work = begin_work
        self._samples = config.actor_rollout_ref.rollout.n
        self._data = data
        self._sampling = sampling
        self._has_baselines = has_baselines
        self.manner = self._manner(config)
        """Hash of how rollouts are drawn, by whatever weights."""
        self.cursor = 0
        """Rows drawn so far."""
        self.returned: tuple[int, ...] = ()
        """Rows that were drawn and given back: they are the next ones."""

    def _manner(self, config: RunConfig) -> str:
        turns = stored_values(config)["actor_rollout_ref"]["rollout"]["multi_turn"]
        del turns["on_unknown"]  # it is about what a process left behind
        drawing = {**asdict(self._sampling), "stop_ids": sorted(self._sampling.stop_ids)}
        rows = self._data.train.fingerprint
        return hash_value([drawing, self._samples, self._has_baselines, turns, rows])

    def next_rows(self, count: int) -> tuple[int, ...]:
        """The rows of so many draws, which are used up then."""
        again, self.returned = self.returned[:count], self.returned[count:]
        rows = self._data.sampler.take(self.cursor, count - len(again))
        self.cursor += len(rows)
        return (*again, *rows)

    def give_back(self, rows: Sequence[int]) -> None:
        """Rows that nothing came of; those that are no longer there stay away."""
        self.returned += tuple(row for row in rows if row < len(self._data.train.prompts))

    def ask(self, place: BatchSlot, journal: WorkJournal | None) -> RolloutHandle:
        """Ask for the rollouts of rows at their place."""
        prompts = [self._data.train.prompts[i] for i in place.rows]

        def submit(purpose: str, samples: int, sampling: Sampling) -> RolloutFuture:
            count, is_first = len(prompts) * samples, place.first == 0
            PROGRESS.expect(purpose, place.step, count, restart=is_first)
            return self.roles.submit(
                prompt_requests(prompts, step=place.step, first=place.first, samples=samples),
                sampling,
                purpose=purpose,
                version=place.version,
                journal=journal,
            )

        greedy = replace(self._sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
        return RolloutHandle(
            place=place,
            drawn=submit("rollout", self._samples, self._sampling),
            greedy=submit("greedy", 1, greedy) if self._has_baselines else None,
            journal=journal,
        )

    def restored(self, tree: Mapping[str, Any], journal: WorkJournal | None) -> RolloutHandle:
        """What `RolloutHandle.as_json` gave; a UserError where the rows are others now."""
        place = BatchSlot.from_json(tree)
        greedy = tree["greedy"]
        return RolloutHandle(
            place=place,
            drawn=self._known(place, tree["drawn"]),
            greedy=None if greedy is None else self._known(place, greedy),
            journal=journal,
        )

    def _known(
        self, place: BatchSlot, trees: Sequence[Sequence[Mapping[str, Any]]]
    ) -> ReadyRollouts:
        prompts = self._data.train.prompts
        groups: list[Group] = []
        for row, some in zip(place.rows, trees, strict=True):
            rollouts = tuple(rollout_of(tree) for tree in some)
            uids = {rollout.group.uid for rollout in rollouts}
            if row >= len(prompts) or uids - {prompts[row].uid}:
                why = f"row {row} is not the one that rollouts of the checkpoint answer"
                fix = "go on with the rows that the run began with"
                raise UserError("data.train_files", sorted(uids)[0], why, fix)
            groups.append(Group(prompt=prompts[row], rollouts=rollouts))
        return ReadyRollouts(groups)


def split_rows(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a checkpoint keeps of some rows, for each of them alone."""
    parts = {name: tree.get(name) for name in ("drawn", "greedy")}
    return [
        {
            **tree,
            "first": tree["first"] + i,
            "rows": [row],
            **{name: None if part is None else [part[i]] for name, part in parts.items()},
        }
        for i, row in enumerate(tree["rows"])
    ]


def _rollout_trees(pending: RolloutFuture) -> list[list[dict[str, Any]]]:
    return [[rollout_tree(one) for one in group.rollouts] for group in pending.result()]
