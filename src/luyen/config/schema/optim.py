"""`optim`: AdamW and its schedule, the same for actor and critic."""

from typing import Literal

from luyen.config.schema.block import Block, Pair, key
from luyen.config.schema.derived import LR_WORDS


class Optim(Block):
    """AdamW, warm-up, schedule and clipping."""

    lr: float = key(1e-6, "Peak learning rate.", derived=LR_WORDS, ge=0)
    lr_warmup_steps: int = key(
        -1,
        "Steps of linear warm-up; -1: use `lr_warmup_steps_ratio`. It is "
        "shortened to end with a run that is shorter.",
        ge=-1,
    )
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of all steps, when `lr_warmup_steps` is -1.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "wsd"] = key(
        "constant", "Course of the learning rate after the warm-up."
    )
    min_lr_ratio: float = key(0.0, "Where cosine and wsd end, as a share of `lr`.", ge=0, le=1)
    weight_decay: float = key(0.01, "AdamW's decoupled weight decay.", ge=0)
    betas: Pair = key((0.9, 0.999), "AdamW's moment decays.")
    clip_grad: float = key(1.0, "Largest norm of the gradient of a step.", gt=0)


class CriticOptim(Optim):
    """The critic's optimizer: the same keys, a higher rate."""

    lr: float = key(1e-5, "Peak learning rate.", ge=0)
