"""The stage `preference` (DPO and kin): pairs or labelled answers, reference log-probs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch

from luyen.algorithms.aggregation import Average
from luyen.algorithms.preference.step import PreferenceObjective, preference_facts
from luyen.base.digests import hash_value
from luyen.base.files import read_json
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.tensors import load_state, save_state
from luyen.config.loader.parse import stored_values
from luyen.config.plan import preference_kwargs
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.offline import OfflineData
from luyen.engine.batch import OfflineBatch
from luyen.engine.preference import MISMATCHED, PreferenceTrainer, SequenceSums
from luyen.engine.step import UpdateResult
from luyen.runtime.offline import OfflineRoles, OfflineWorker
from luyen.train.builders.roles import reference_policy
from luyen.train.offline.pairs import margin_of, pack_labelled, pack_pairs
from luyen.train.offline.sft import build_learner
from luyen.train.offline.stage import (
    Goal,
    OfflineStage,
    StageContext,
    StageKind,
    WorkerContext,
    dropout_key,
    validation_names,
)

# Precomputed reference log-probs: the reference is frozen, so its sums are computed once
# and stored in the run directory; they equal those of a live reference. The table is keyed by rows,
# weights and objective, and recomputed when the key changes.

_FOLDER, _NAME = "reference", "sums"


def precomputed_reference(
    live: Callable[[OfflineBatch], SequenceSums],
    batches: Callable[[int], Iterable[OfflineBatch]],
    context: StageContext,
    directory: RunDirectory,
    *,
    weights: Mapping[str, str],
) -> Callable[[OfflineBatch], SequenceSums]:
    """A lookup with the results of the live reference, computed once for all `batches`.

    `weights` are digests of the reference's. The table is stored in the run directory.
    """
    key, folder = _key(context, weights), directory.root / _FOLDER
    table = _stored_sums(folder, key) or _compute_sums(live, batches, context, folder, key)
    device = context.roles.device

    def looked_up(offline_batch: OfflineBatch) -> SequenceSums:
        rows = [table[str(place)] for place in offline_batch.rows]
        return {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}

    return looked_up


def _compute_sums(
    live: Callable[[OfflineBatch], SequenceSums],
    batches: Callable[[int], Iterable[OfflineBatch]],
    context: StageContext,
    folder: Path,
    key: str,
) -> dict[str, SequenceSums]:
    size, total = context.config.data.train_batch_size, _count(context.data)
    table: dict[str, SequenceSums] = {}
    for offline_batch in batches(size):
        context.display.waiting(f"reference: log-probabilities of {len(table)} of {total} rows")
        by_row = {name: offline_batch.by_row(x.cpu()) for name, x in live(offline_batch).items()}
        for i, place in enumerate(offline_batch.rows):
            table[str(place)] = {name: parts[i].clone() for name, parts in by_row.items()}
    folder.mkdir(exist_ok=True)
    places = list(table)
    joined = {name: torch.cat([table[p][name] for p in places]) for name in table[places[0]]}
    sizes = [len(next(iter(table[p].values()))) for p in places]
    kept = {"places": [int(p) for p in places], "sizes": sizes}
    save_state(folder, _NAME, {"key": key, **kept, "sums": joined})
    return table


def _stored_sums(folder: Path, key: str) -> dict[str, SequenceSums] | None:
    """The stored table, if it has this key."""
    if not (folder / f"{_NAME}.json").is_file():
        return None
    if read_json(folder / f"{_NAME}.json")["state"].get("key") != key:
        return None
    kept = load_state(folder, _NAME)
    parts = {name: x.split(kept["sizes"]) for name, x in kept["sums"].items()}
    return {
        str(place): {name: split[i] for name, split in parts.items()}
        for i, place in enumerate(kept["places"])
    }


def _key(context: StageContext, weights: Mapping[str, str]) -> str:
    """Hash of everything the table depends on."""
    config, rows = context.config, context.data.given
    validation = rows.validation.fingerprint if rows.validation is not None else None
    arr, data = config.actor_rollout_ref, config.data
    return hash_value(
        [
            [
                rows.train.fingerprint,
                validation,
                len(context.data.train),
                len(context.data.validation),
            ],
            stored_values(config)["actor_rollout_ref"]["model"],
            arr.ref.path,
            [config.preference.ld_alpha, list(config.preference.loss_type)],
            [data.max_prompt_length, data.max_response_length, data.apply_chat_template_kwargs],
            [dict(weights), context.tokenizer.fingerprint()],
        ]
    )


def _count(data: OfflineData[Any]) -> int:
    return len(data.train) + len(data.validation)


_STATE = "preference"


@final
class PreferenceStage:
    """Preference optimisation (DPO, KTO, ...) on pairs or labelled answers."""

    goals = (
        Goal(metric="preference/val_accuracy", label="held-out preference accuracy"),
        Goal(metric="preference/accuracy", label="preference accuracy"),
    )

    def __init__(
        self,
        roles: OfflineRoles,
        objective: PreferenceObjective,
        data: OfflineData[Any],
        *,
        use_margins: bool,
        is_mismatched: bool,
        longest: int,
        seed: int = 0,
    ) -> None:
        """`seed` is the run's: with the step it decides the masks of an adapter's dropout."""
        self.roles = roles
        self.trainer = PreferenceTrainer(roles, objective)
        """Its steps; its reference is set once it can be computed."""
        self._data = data
        self._use_margins = use_margins
        self._is_mismatched = is_mismatched
        self._longest = longest
        self._seed = seed
        if use_margins:
            for row in (*data.train, *data.validation):
                margin_of(row)

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the rows at these indices: two sequences per pair, one per labelled answer."""
        return self._pack(self._data.train, rows)

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step."""
        key = dropout_key(self._seed, step)
        return self.trainer.update(offline_batch, lr=lr, dropout_key=key)

    def measure(self) -> dict[str, float]:
        """The metrics of a step, on all validation rows."""
        rows = self._data.validation
        if not rows:
            return {}
        found = self.trainer.measure(self._pack(rows, range(len(rows)), is_validation=True))
        return validation_names(found)

    def state(self) -> dict[str, dict[str, Any]]:
        """Running statistics of the objective."""
        history = self.trainer.history
        kept = None if history is None else [float(history.total), float(history.count)]
        return {_STATE: {"history": kept}}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the running statistics."""
        kept = state[_STATE]["history"]
        total, count = (torch.tensor(x, dtype=torch.float64) for x in kept or (0.0, 0.0))
        self.trainer.history = None if kept is None else Average(total=total, count=count)

    def batches(self, size: int) -> Iterator[OfflineBatch]:
        """All training rows, then all validation rows, in batches of `size`."""
        for rows, is_validation in ((self._data.train, False), (self._data.validation, True)):
            for first in range(0, len(rows), size):
                places = range(first, min(first + size, len(rows)))
                yield self._pack(rows, places, is_validation=is_validation)

    def _pack(
        self, rows: Sequence[Any], places: Sequence[int], *, is_validation: bool = False
    ) -> OfflineBatch:
        renderer = self._data.given.renderer
        if self.trainer.objective.kind == "pair":
            return pack_pairs(
                rows,
                places,
                renderer,
                self.roles.device,
                use_margins=self._use_margins,
                is_validation=is_validation,
            )
        return pack_labelled(
            rows,
            places,
            renderer,
            self.roles.device,
            is_mismatched=self._is_mismatched,
            longest=self._longest,
            is_validation=is_validation,
        )


def objective_of(config: RunConfig) -> PreferenceObjective:
    """Objective of the stage."""
    preference = config.preference
    return PreferenceObjective(
        losses=preference.loss_type,
        loss_weights=preference.loss_weights or None,
        hparams=preference_kwargs(preference),
        ld_alpha=preference.ld_alpha,
    )


def kinds_of(config: RunConfig) -> tuple[Kind, ...]:
    """Row formats that the losses accept."""
    is_paired = preference_facts(config.preference.loss_type[0]).kind == "pair"
    return (Kind.PREFERENCE,) if is_paired else (Kind.LABELLED, Kind.PREFERENCE)


def _worker(context: WorkerContext) -> OfflineWorker:
    config, reference = context.config, None
    learner = build_learner(context)
    if objective_of(config).needs_reference and config.actor_rollout_ref.model.lora_rank == 0:
        model = reference_policy(config, context.tokenizer, context.device, on_host=context.on_host)
        reference = context.frozen(model)
    return OfflineWorker(learner=learner, reference=reference, rank=context.rank)


def _build(context: StageContext) -> OfflineStage:
    config, roles = context.config, context.roles
    objective = objective_of(config)
    stage = PreferenceStage(
        roles,
        objective,
        context.data,
        use_margins=config.preference.use_margins,
        is_mismatched=objective.reads(MISMATCHED),
        longest=config.data.max_prompt_length + config.data.max_response_length,
        seed=config.trainer.seed,
    )
    if not objective.needs_reference:
        return stage

    def live(offline_batch: OfflineBatch) -> SequenceSums:
        return stage.trainer.sums(roles.reference_scores, offline_batch)

    stage.trainer.reference = live
    # A replay has no directory: it computes the rows of its steps only.
    if config.preference.reference == "precomputed" and context.directory is not None:
        stage.trainer.reference = precomputed_reference(
            live, stage.batches, context, context.directory, weights=roles.reference_digests()
        )
        roles.drop_reference()
    return stage


PREFERENCE = StageKind(kinds=kinds_of, worker=_worker, build=_build)
