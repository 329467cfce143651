"""The teacher of a run: a frozen model that reads the same ids as the student."""

from luyen.base.errors import UserError
from luyen.config.schema.model import Model
from luyen.config.schema.run import RunConfig
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.models.load import load_policy
from luyen.models.policy import Policy

_FIELD = "distill.teacher_path"


def load_teacher(config: RunConfig, tokenizer: Tokenizer, device: str) -> Policy:
    """The teacher; `tokenizer` is the student's.

    It never learns, and no checkpoint holds it. A UserError where its tokens are not the student's:
    probabilities of two vocabularies cannot be compared.
    """
    path = config.distill.teacher_path
    assert path is not None, "the check demands a teacher"
    student = config.actor_rollout_ref.model
    model = Model(path=path, dtype=student.dtype, trust_remote_code=student.trust_remote_code)
    model = model.model_copy(update={"enable_gradient_checkpointing": False})
    try:
        own = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        _refuse_other_ids(path, tokenizer.difference(own))
        teacher = load_policy(
            model, device=device, vocabulary=tokenizer.size, may_be_plain=True, field=_FIELD
        )
    except UserError as error:
        raise UserError(_FIELD, path, error.why, error.fix) from error
    rows = teacher.head.vocabulary
    _refuse_other_ids(
        path, f"it has {rows} of {tokenizer.size} ids" if rows < tokenizer.size else ""
    )
    teacher.requires_grad_(False)
    teacher.is_exact = config.actor_rollout_ref.rollout.deterministic
    return teacher


def _refuse_other_ids(path: str, difference: str | None) -> None:
    if difference:
        why = f"its tokens are not the student's: {difference}"
        raise UserError(_FIELD, path, why, "take a teacher with the tokenizer of the student")
