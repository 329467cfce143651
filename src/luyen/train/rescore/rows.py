"""The prompts of recorded rollouts: files of rollouts hold tokens, and rewards read rows."""

from collections.abc import Sequence

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.base.rundir import RunDirectory
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData, build_data
from luyen.data.tokenizer import Tokenizer
from luyen.train.build_roles import surroundings_of


def prompts_of(
    directory: RunDirectory, config: RunConfig, tokenizer: Tokenizer, *, is_validation: bool
) -> dict[str, Prompt]:
    """The rows that a run drew from, by uid, tools on offer included.

    A UserError when the files hold other rows than at the time of the run: what a reward compares
    with might be another, and no number would show it.
    """
    around = surroundings_of(config)
    offered = around.offered if around is not None else None
    data = build_data(config.data, tokenizer=tokenizer, seed=config.trainer.seed, offered=offered)
    split = "validation" if is_validation else "train"
    field = "data.val_files" if is_validation else "data.train_files"
    found = data.validation if is_validation else data.train
    if found is None:
        raise UserError(field, None, "the run measured on no rows", "leave out --validation")
    files = config.data.val_files if is_validation else config.data.train_files
    if found.fingerprint not in _known(directory, split):
        why = "its rows are not those that the run began or was resumed with"
        raise UserError(field, ", ".join(files), why, "put the files back as they were")
    return {prompt.uid: prompt for prompt in _rows(data, is_validation=is_validation)}


def grouped(
    rollouts: Sequence[Rollout], prompts: dict[str, Prompt]
) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
    """Rollouts by the draw they belong to, in the order of their keys, with what was asked."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.key):
        groups.setdefault(str(rollout.group), []).append(rollout)
    found: list[tuple[Prompt, tuple[Rollout, ...]]] = []
    for name, some in groups.items():
        prompt = prompts.get(some[0].group.uid)
        if prompt is None:
            why = "no row of the run's files has the uid of its prompt"
            fix = "put back tools, template and filters of data as they were"
            raise UserError("rollout", name, why, fix)
        found.append((prompt, tuple(some)))
    return found


def _rows(data: TrainData, *, is_validation: bool) -> tuple[Prompt, ...]:
    if not is_validation:
        return data.train.prompts
    return data.validation.prompts if data.validation is not None else ()


def _known(directory: RunDirectory, split: str) -> set[str]:
    """Fingerprints of the rows that the run was begun and resumed with."""
    facts = [directory.read_manifest()]
    facts += [noted["changed"] for noted in directory.read_resumptions()]
    return {found for f in facts if (found := f.get("datasets", {}).get(split)) is not None}
