"""What the run was told: the arithmetic of a step, and every key that is not at its default."""

import json
from collections.abc import Mapping
from typing import Any

from luyen.base.errors import UserError
from luyen.base.secrets import masked_tree
from luyen.config.fields import all_fields
from luyen.config.plan import BatchPlan, plan_batches
from luyen.config.rules.rule import value_at
from luyen.studio.doctor.read import RunRecord
from luyen.studio.report.markup import Child, Html, element, joined, missing, table


def plan_of(record: RunRecord) -> BatchPlan | None:
    """The arithmetic of a step; None where the configuration cannot be read."""
    if _is_unread(record):
        return None
    trainer = record.config.trainer
    return plan_batches(record.config, world_size=trainer.nnodes * trainer.n_gpus_per_node)


def settings_section(record: RunRecord) -> Html:
    """The plan, what differs from the defaults and where it was written, and then all keys."""
    plan = plan_of(record)
    if plan is None:
        return missing("config.yaml cannot be read, so what the run was told is not known.")
    try:
        origins: dict[str, str] = record.directory.read_provenance()
        note = None
    except UserError as error:
        origins, note = {}, missing(f"Where keys were written cannot be read: {error.why}.")
    changed: list[tuple[Child, ...]] = []
    rest: list[tuple[Child, ...]] = []
    for path, info in all_fields().items():
        value = _value(record, path)
        row = (element("code", path), _shown(value), _shown(info.default))
        if value == info.default:
            rest.append(row[:2])
        else:
            changed.append((*row, _origin(path, origins)))
    everything = element(
        "details",
        element("summary", f"{len(rest)} keys at their defaults"),
        table(("key", "value"), rest),
    )
    head = ("key", "value", "default", "written in")
    return joined(_arithmetic(record, plan), note, table(head, changed), everything)


def _arithmetic(record: RunRecord, plan: BatchPlan) -> Html:
    if record.config.trainer.stage != "rl":
        stage = record.config.trainer.stage
        return element("p", f"Stage {stage}: {plan.prompts} rows a step, one optimizer step each.")
    algorithm = record.config.algorithm.adv_estimator
    return element(
        "p",
        f"{algorithm}: {plan.prompts} prompts x {plan.samples_per_prompt} samples = "
        f"{plan.rollouts:,} rollouts a step, {plan.mini_batch_rollouts:,} of them for each of "
        f"{plan.optimizer_steps} optimizer step{_s(plan.optimizer_steps)}, sequences of at most "
        f"{plan.longest_sequence:,} tokens.",
    )


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Where a key, or something below it, was written."""
    below = [where for key, where in origins.items() if key.startswith(f"{path}.")]
    return origins.get(path) or ", ".join(dict.fromkeys(below)) or "not noted"


def _shown(value: Any) -> Html:
    return element("code", json.dumps(value, default=str, ensure_ascii=False))


def _value(record: RunRecord, path: str) -> Any:
    """What stands at a key, without what is secret in it."""
    return masked_tree(value_at(record.config, path), path.rpartition(".")[2])


def _is_unread(record: RunRecord) -> bool:
    if not record.directory.config.is_file():
        return True
    return any(one.file == record.directory.config.name for one in record.unread)
