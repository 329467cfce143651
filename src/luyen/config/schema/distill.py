"""`distill`: learning from a teacher, on given answers or on the student's own."""

from typing import Literal

from luyen.config.schema.block import Block, key


class Distill(Block):
    """A teacher, and what of it the student learns.

    `trainer.stage: distill` learns on the answers of the rows. `on_policy` puts the teacher into
    `trainer.stage: rl`, where the student learns on what it samples.
    """

    teacher_path: str | None = key(
        None,
        "Directory, hub id or `builtin://` name of the teacher, whose tokenizer must be the "
        "student's.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "topk_forward_kl"] = key(
        "forward_kl",
        "What is made small at each token of a given answer. reverse_kl: KL(student, teacher); "
        "forward_kl: KL(teacher, student); jsd: between the two; topk_forward_kl: forward_kl over "
        "the teacher's likeliest tokens and one bucket for all others.",
    )
    beta: float = key(0.5, "jsd: share of the teacher in the middle distribution.", ge=0, le=1)
    top_k: int = key(64, "topk_forward_kl: tokens of the teacher that are told apart.", ge=1)
    temperature: float = key(
        1.0, "Both distributions over given answers are flattened by it before they meet.", gt=0
    )
    nll_weight: float = key(
        0.0, "Weight of the likelihood of the given answers beside the divergence.", ge=0
    )
    on_policy: bool = key(
        False,
        "In `trainer.stage: rl`: how much likelier than the student the teacher finds each sampled "
        "token is its advantage.",
    )
    task_weight: float = key(
        0.0,
        "on_policy: weight of the advantages of `algorithm.adv_estimator` beside the teacher's; at "
        "0 training needs no reward and computes none.",
        ge=0,
    )
