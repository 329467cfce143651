"""`explain`: choices of every key that has some, and what words lead to."""

import pytest

from luyen.base.errors import UserError
from luyen.config.explain import OPEN, PAGES, explain
from luyen.config.fields import all_fields
from tests.architecture.tree import ROOT


def test_every_key_with_choices_lists_them():
    text = explain("algorithm.adv_estimator")
    assert "choices   gae, grpo," in text
    assert "rloo" in text
    for path, names in OPEN.items():
        assert path in all_fields()
        assert all(name in explain(path) for name in names)
    for path, info in all_fields().items():
        assert all(choice in explain(path) for choice in info.choices)


@pytest.mark.parametrize(
    ("words", "first", "more"),
    [
        ("grpo", "algorithm.norm_adv_by_std_in_grpo", ["algorithm.adv_estimator", "algorithms"]),
        ("lora", "actor_rollout_ref.model.lora_rank", ["model.lora_alpha"]),
        ("resume", "trainer.resume_mode", ["trainer.resume_from_path", "docs/reliability.md"]),
        ("learning rate", "actor_rollout_ref.actor.optim.lr", ["critic.optim.lr"]),
        ("checkpoint", "trainer.save_freq", ["docs/reliability.md"]),
    ],
)
def test_words_lead_to_keys_and_pages(words: str, first: str, more: list[str]):
    lines = explain(words).splitlines()
    keys = [line.split()[0] for line in lines if line.startswith("  ")]
    assert first in keys[:6]
    assert all(any(one in line for line in lines) for one in more)


def test_words_that_lead_nowhere_are_an_error():
    with pytest.raises(UserError, match="of this name"):
        explain("zzzz")


def test_every_page_is_there():
    assert [page for page in PAGES if not (ROOT / page).exists()] == []


def test_words_that_no_key_has_together_find_the_keys_with_most_of_them():
    """`strings` stands nowhere about stopping, and `stop` does."""
    assert "actor_rollout_ref.rollout.stop " in explain("stop strings")
    with pytest.raises(UserError, match="no key, block or rule"):
        explain("xyzzy plugh")
