"""The configuration cannot lie: every field is read, or says why nobody reads it.

A block is always held in a variable or an attribute named after its key, so a field is read where
the source loads `<parent key>.<field>`: `config.actor_rollout_ref.rollout.n`, or `rollout.n`. The
knobs of an algorithm are taken by name instead, and found by planting a value and looking for it.

A field that awaits a consumer, or that has one implemented value, is refused by `check` at any
other value; a mark of the first kind must go when the consumer arrives.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from luyen.config.catalog import ADV_ESTIMATORS, POLICY_LOSSES
from luyen.config.fields import walk
from luyen.config.plan import estimator_kwargs, loss_kwargs
from luyen.config.schema.run import RunConfig
from tests.architecture.tree import nodes, sources

SCHEMA = "src/luyen/config/schema/"
Field = tuple[str, str | None, str | None]
"""Path, the consumer it awaits, the reason why it has one value only."""


def reads(text: str) -> set[str]:
    """The last two and the last three names of every attribute chain that the code loads."""
    found: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute) and len(names) < 3:
                names, owner = [owner.attr, *names], owner.value
            if isinstance(owner, ast.Name) and len(names) < 3:
                names = [owner.id, *names]
            found |= {".".join(names[-2:]), ".".join(names[-3:])}
    return found


def planted(block: Any, path: str, value: object) -> Any:
    """A copy of the block with the value at a path, whatever the type of the field."""
    name, _, rest = path.partition(".")
    inner = planted(vars(block)[name], rest, value) if rest else value
    return block.model_copy(update={name: inner})


def is_knob(path: str) -> bool:
    """Whether some algorithm is handed the value of this field."""
    value = object()
    config = planted(RunConfig(), path, value)
    handed = [estimator_kwargs(config, facts) for facts in ADV_ESTIMATORS.values()]
    handed += [loss_kwargs(config, facts) for facts in POLICY_LOSSES.values()]
    return any(value is given for hparams in handed for given in hparams.values())


def violations(fields: Iterable[Field], read: set[str]) -> list[str]:
    """Fields nobody reads and nobody marked, and marks on fields that are read.

    Where a marked and an unmarked field end in the same two names, three tell them apart.
    """
    known = list(fields)
    plain = {".".join(path.split(".")[-2:]) for path, awaits, _ in known if awaits is None}
    problems: list[str] = []
    for path, awaits, only in known:
        end = ".".join(path.split(".")[-2:])
        if awaits is not None and end in plain:
            end = ".".join(path.split(".")[-3:])
        is_read = end in read or path in read
        if is_read and awaits is not None:
            problems.append(f"{path} is read: remove its mark ({awaits})")
        if not is_read and not awaits and not only:
            problems.append(f"{path} is read nowhere")
    return problems


def test_every_field_is_read_or_marked(capsys: pytest.CaptureFixture[str]):
    fields = list(walk())
    assert len(fields) > 50
    waiting: dict[str, list[str]] = defaultdict(list)
    for field in fields:
        if field.awaits is not None:
            waiting[field.awaits].append(field.path)
    with capsys.disabled():
        for consumer, paths in sorted(waiting.items()):
            print(f"\nread by nobody until {consumer}: {', '.join(paths)}", end="")
    read = {name for path, text in sources() if not path.startswith(SCHEMA) for name in reads(text)}
    read |= {field.path for field in fields if is_knob(field.path)}
    assert violations([(f.path, f.awaits, f.only) for f in fields], read) == []


def test_every_field_is_documented():
    assert [field.path for field in walk() if not field.doc.strip()] == []


def test_an_unread_field_and_a_stale_mark_are_caught():
    read = reads("def f(config):\n    n = config.actor_rollout_ref.rollout.n\n    return data.seed")
    fields: list[Field] = [
        ("actor_rollout_ref.rollout.n", None, None),
        ("reward.reward_model.rollout.n", "the reward model", None),
        ("data.seed", "the data layer", None),
        ("trainer.device", None, None),
        ("trainer.nnodes", "the runtime", None),
        ("actor_rollout_ref.model.use_remove_padding", None, "batches are always packed"),
    ]
    assert violations(fields, read) == [
        "data.seed is read: remove its mark (the data layer)",
        "trainer.device is read nowhere",
    ]
    stale = violations(fields, read | reads("reward.reward_model.rollout.n"))
    assert "reward.reward_model.rollout.n is read: remove its mark (the reward model)" in stale


def test_writing_an_attribute_or_naming_it_elsewhere_is_no_read():
    assert "rollout.n" not in reads("rollout.n = 1\nother.n\nrollout().n\n'rollout.n'")


def test_a_knob_is_known_by_where_its_value_arrives():
    assert is_knob("algorithm.gamma")
    assert is_knob("actor_rollout_ref.actor.policy_loss.clip_cov_ratio")
    assert not is_knob("trainer.project_name")
