"""Every offline stage by the name that `trainer.stage` gives it."""

from luyen.train.offline import distill, preference, reward_model, sft
from luyen.train.offline.stage import StageKind

STAGES: dict[str, StageKind] = {
    "sft": sft.STAGE,
    "preference": preference.STAGE,
    "reward_model": reward_model.STAGE,
    "distill": distill.STAGE,
}
