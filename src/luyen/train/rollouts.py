"""Rollout requests of training rows: addresses, handles, submission, form in checkpoints."""

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


def prompt_requests(
    prompts: Sequence[Prompt], *, step: int, first: int, samples: int
) -> list[PromptRequest]:
    """One request for each prompt; its `GroupId` is the address that random numbers derive from."""
    return [
        PromptRequest(
            group=GroupId(step=step, draw=first + i, uid=prompt.uid), prompt=prompt, samples=samples
        )
        for i, prompt in enumerate(prompts)
    ]


ParentDigest: TypeAlias = tuple[str, str | None]
"""Digest chain at submission, and the weights hash where the chain is empty (first step)."""
OpenJournal: TypeAlias = Callable[[int, str, ParentDigest | None], WorkJournal | None]
"""`(step, kind, origin)`: open a step's journal of a kind; `origin` None leaves it not begun."""
BeginJournal: TypeAlias = Callable[[WorkJournal | None, int, str, ParentDigest], None]
"""`(journal, step, kind, origin)`: begin a journal that was opened without an origin."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """Position of a batch of rows in a run, and the version they were submitted with.

    Example:
        >>> BatchSlot(step=3, first=8, rows=(5, 6), version=2, origin=("", None)).rows
        (5, 6)
    """

    step: int
    """The step that they are generated for."""
    first: int
    """Number of groups of that step before them."""
    rows: tuple[int, ...]
    """Indices of their prompts."""
    version: int
    """Newest version of the weights at submission."""
    origin: ParentDigest
    """Digest chain and weights hash at submission."""

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
    """Submitted rollouts of one batch of rows.

    Example:
        >>> slot = BatchSlot(step=1, first=0, rows=(), version=0, origin=("", None))
        >>> RolloutHandle(slot=slot, sampled=ReadyRollouts([]), greedy=None, journal=None).is_done
        True
    """

    slot: BatchSlot
    """Position of the batch in the run."""
    sampled: RolloutFuture
    """Groups of sampled rollouts."""
    greedy: RolloutFuture | None
    """Greedy response to each prompt (ReMax baseline); None where the algorithm needs none."""
    journal: WorkJournal | None
    """Journal of the step's finished work; None: not journaled."""

    @property
    def is_done(self) -> bool:
        """Whether all rollouts are finished."""
        return self.sampled.done() and (self.greedy is None or self.greedy.done())

    def needs_other_weights(self, version: int) -> bool:
        """Whether some are unfinished and were submitted with another version than `version`."""
        return not self.is_done and self.slot.version != version

    def snapshot(self) -> dict[str, Any]:
        """JSON for a checkpoint, without waiting; an unfinished batch is regenerated on resume."""
        return self.as_json() if self.is_done else {**self.slot.as_json(), "drawn": None}

    def as_json(self) -> dict[str, Any]:
        """JSON for a checkpoint, with every rollout; waits for unfinished ones."""
        sampled = _rollout_trees(self.sampled)
        greedy = None if self.greedy is None else _rollout_trees(self.greedy)
        return {**self.slot.as_json(), "drawn": sampled, "greedy": greedy}


@final
class RolloutSubmitter:
    """Takes training rows from the sampler and submits their rollouts to the roles."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainData,
        roles: Roles,
        sampling: Sampling,
        *,
        has_baselines: bool,
        open_journal: OpenJournal,
        begin_journal: BeginJournal,
    ) -> None:
        """`open_journal` opens a step's journal, `begin_journal` begins it once known."""
        self.batch = config.data.train_batch_size
        """Groups per step (`data.train_batch_size`)."""
        self.roles = roles
        self.open_journal = open_journal
        self.begin_journal = begin_journal
        self._samples = config.actor_rollout_ref.rollout.n
        self._data = data
        self._sampling = sampling
        self._has_baselines = has_baselines
        self.sampling_hash = self._sampling_hash(config)
        """Hash of everything but the weights that decides what is generated."""
        self.cursor = 0
        """Rows taken from the sampler so far."""
        self.returned: tuple[int, ...] = ()
        """Rows that were taken and returned unused: they are taken first."""

    def _sampling_hash(self, config: RunConfig) -> str:
        turns = stored_values(config)["actor_rollout_ref"]["rollout"]["multi_turn"]
        del turns["on_unknown"]  # concerns resuming only, not what is generated
        sampling = {**asdict(self._sampling), "stop_ids": sorted(self._sampling.stop_ids)}
        del sampling["top_logprobs"]  # concerns what is reported only
        rows = self._data.train.fingerprint
        return hash_value([sampling, self._samples, self._has_baselines, turns, rows])

    def restore_rows(self, cursor: int, returned: tuple[int, ...]) -> None:
        """Continue with the rows after those that a checkpoint has taken and returned."""
        self.cursor, self.returned = cursor, returned

    def next_rows(self, count: int) -> tuple[int, ...]:
        """Take the next `count` rows: returned ones first, then new ones of the sampler."""
        again, self.returned = self.returned[:count], self.returned[count:]
        rows = self._data.sampler.take(self.cursor, count - len(again))
        self.cursor += len(rows)
        return (*again, *rows)

    def return_rows(self, rows: Sequence[int]) -> None:
        """Return rows that were not trained on; rows beyond the current dataset are dropped."""
        self.returned += tuple(row for row in rows if row < len(self._data.train.prompts))

    def submit(self, slot: BatchSlot, journal: WorkJournal | None) -> RolloutHandle:
        """Submit the rows of a slot; returns without waiting."""
        prompts = [self._data.train.prompts[i] for i in slot.rows]

        def generate(purpose: str, samples: int, sampling: Sampling) -> RolloutFuture:
            count, is_first = len(prompts) * samples, slot.first == 0
            PROGRESS.expect(purpose, slot.step, count, restart=is_first)
            return self.roles.submit(
                prompt_requests(prompts, step=slot.step, first=slot.first, samples=samples),
                sampling,
                purpose=purpose,
                version=slot.version,
                journal=journal,
            )

        greedy = replace(self._sampling, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
        return RolloutHandle(
            slot=slot,
            sampled=generate("rollout", self._samples, self._sampling),
            greedy=generate("greedy", 1, greedy) if self._has_baselines else None,
            journal=journal,
        )

    def restore_handle(self, tree: Mapping[str, Any], journal: WorkJournal | None) -> RolloutHandle:
        """Inverse of `RolloutHandle.as_json`; a UserError where the rows have changed."""
        slot = BatchSlot.from_json(tree)
        greedy = tree["greedy"]
        return RolloutHandle(
            slot=slot,
            sampled=self._recorded_rollouts(slot, tree["drawn"]),
            greedy=None if greedy is None else self._recorded_rollouts(slot, greedy),
            journal=journal,
        )

    def _recorded_rollouts(
        self, slot: BatchSlot, trees: Sequence[Sequence[Mapping[str, Any]]]
    ) -> ReadyRollouts:
        prompts = self._data.train.prompts
        groups: list[Group] = []
        for row, some in zip(slot.rows, trees, strict=True):
            rollouts = tuple(rollout_of(tree) for tree in some)
            uids = {rollout.group.uid for rollout in rollouts}
            if row >= len(prompts) or uids - {prompts[row].uid}:
                why = f"row {row} is not the one that rollouts of the checkpoint answer"
                fix = "go on with the rows that the run began with"
                raise UserError("data.train_files", sorted(uids)[0], why, fix)
            groups.append(Group(prompt=prompts[row], rollouts=rollouts))
        return ReadyRollouts(groups)


def split_rows(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the saved JSON of a batch into one per row."""
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
