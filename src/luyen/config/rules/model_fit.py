"""M: what a run puts together fits: an adapter its model, a teacher its student."""

from collections.abc import Iterator

from luyen.config.model_folder.adapter import read_adapter_config
from luyen.config.model_folder.expected import expected_shapes
from luyen.config.model_folder.files import UnsoundFile
from luyen.config.model_folder.locate import folder_of
from luyen.config.model_folder.sizes import read_config, text_config
from luyen.config.model_folder.tokenizer import vocabulary
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.signals import has_teacher

_MODEL = "actor_rollout_ref.model"


@rule("M12", "error")
def adapter_has_a_place(s: Situation) -> Iterator[Finding]:
    """An adapter is put on linear layers that the model has, with the scale it was trained with."""
    model = s.config.actor_rollout_ref.model
    if model.lora_rank == 0:
        return
    field, fix = f"{_MODEL}.target_modules", "name linear layers of the model, or all-linear"
    if not model.target_modules:
        yield Finding(field=field, why="no module would get an adapter", fix=fix)
    there = _linear_layers(s)
    if there and model.target_modules != ("all-linear",):
        for name in model.target_modules:
            if not any(layer == name or layer.endswith(f".{name}") for layer in there):
                yield Finding(field=field, why=f"the model has no linear layer `{name}`", fix=fix)
    trained = _trained_scale(model.lora_adapter_path)
    if trained is not None and trained != model.lora_alpha:
        why = f"the adapter in {model.lora_adapter_path} was trained with {trained}"
        yield Finding(field=f"{_MODEL}.lora_alpha", why=why, fix=f"set it to {trained}")


def _linear_layers(s: Situation) -> list[str]:
    """Names of the linear layers; none where the architecture is not a common one."""
    model = s.config.actor_rollout_ref.model
    folder = folder_of(model.path)
    try:
        config = {} if folder is None else text_config(read_config(folder), model.override_config)
    except UnsoundFile:
        return []  # M06 says why
    shapes = expected_shapes(config, (), has_head=True) or {}
    return [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]


def _trained_scale(path: str | None) -> float | None:
    folder = None if path is None else folder_of(path)
    try:
        return None if folder is None else (read_adapter_config(folder) or {}).get("lora_alpha")
    except UnsoundFile:
        return None  # M06 says why


@rule("H06", "error")
def teacher_reads_the_same_ids(s: Situation) -> Iterator[Finding]:
    """The tokens of a teacher have the ids that they have for the student."""
    model, path = s.config.actor_rollout_ref.model, s.config.distill.teacher_path
    if not has_teacher(s.config) or path is None:
        return
    mine, theirs = (_vocabulary(place) for place in (model.tokenizer_path or model.path, path))
    if mine is None or theirs is None or mine == theirs:
        return
    odd = [t for t in sorted(mine.keys() | theirs.keys()) if mine.get(t) != theirs.get(t)]
    why = f"its tokens are not the student's: {len(odd)} have other ids, the first is {odd[0]!r}"
    fix = "take a teacher with the tokenizer of the student"
    yield Finding(field="distill.teacher_path", why=why, fix=fix)


def _vocabulary(path: str) -> dict[str, int] | None:
    folder = folder_of(path)
    try:
        return None if folder is None else vocabulary(folder)
    except UnsoundFile:
        return None  # M06 says why
