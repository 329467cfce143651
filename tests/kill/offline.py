"""Offline runs that are killed: which runs, and where each comes by."""

from tests.kill.points import POINTS, Point
from tests.runs import MODEL

_PAIRS = "arithmetic://sum?digits=1&size=32&pairs=even"
_MARKED = "arithmetic://sum?digits=1&size=32&labels=even"
_PREFERENCE = ("trainer.stage=preference", f"data.train_files={_PAIRS}", f"data.val_files={_PAIRS}")
_UNPAIRED = (
    "trainer.stage=preference",
    f"data.train_files={_MARKED}",
    f"data.val_files={_MARKED}",
)
_TRACES = (
    "data.train_files=arithmetic://sum?digits=1&size=32&traces=1",
    "data.val_files=arithmetic://sum?digits=1&traces=1&split=held-out",
)
OFFLINE: dict[str, tuple[str, ...]] = {
    "sft": ("trainer.stage=sft", "sft.loss=dft", *_TRACES),
    "DPO": _PREFERENCE,
    "DPO, LoRA": (*_PREFERENCE, f"{MODEL}.lora_rank=4"),
    "KTO, precomputed": (
        *_UNPAIRED,
        "preference.loss_type=kto",
        "preference.reference=precomputed",
    ),
    "BCO": (*_UNPAIRED, "preference.loss_type=bco"),
    "reward model": ("trainer.stage=reward_model", *_PREFERENCE[1:]),
    "distill": (
        "trainer.stage=distill",
        "distill.teacher_path=builtin://arithmetic",
        *_TRACES,
    ),
}
"""Name -> what makes a tiny run one of this kind."""

_KEPT = (
    "the directory is made, its manifest is not",
    "between two optimizer steps",
    "the digest is written, the metrics are not",
    "the metrics are written",
    "inside the writing of a checkpoint",
    "a checkpoint is written and not in place",
    "an old checkpoint goes",
)
OFFLINE_POINTS: dict[str, Point] = {name: POINTS[name] for name in _KEPT} | {
    "between two optimizer steps": Point(
        where="luyen.engine.optim:MasterOptimizer.step", when="after", calls=(1, 3)
    ),
    "the held-out rows are measured": Point(
        where="luyen.train.offline.loop:OfflineRun.measure", when="before", calls=(1, 2)
    ),
    "a batch is packed": Point(
        where="luyen.train.offline.loop:OfflineSchedule.offline_batch", when="after", calls=(1, 4)
    ),
    "an offline step is taken": Point(
        where="luyen.train.offline.loop:OfflineSchedule.stages", when="before", calls=(1, 3)
    ),
    "the reference is half written": Point(
        where="luyen.train.offline.preference:save_state", when="before", calls=(1,)
    ),
    "the reference is written": Point(
        where="luyen.train.offline.preference:save_state", when="after", calls=(1,)
    ),
    "offline training is over": Point(
        where="luyen.train.offline.start:train_offline", when="after", calls=(1,)
    ),
}  # fmt: skip


def is_passed(run: str, point: str) -> bool:
    """Whether a run of this kind comes by the point."""
    return "precomputed" in run or not point.startswith("the reference")
