"""From the configuration to how an engine draws, in training and at validation."""

import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.data.tokenizer import load_tokenizer
from luyen.pipeline.policy_loading import open_checkpoint
from luyen.studio.chat import ChatSession
from luyen.train.builders.roles import training_sampling, validation_sampling

R = "actor_rollout_ref.rollout"
TOKENIZER = load_tokenizer("builtin://arithmetic")


def samplings(*words: str):
    config = check([], ["data.train_files=arithmetic://sum", *words]).config
    return training_sampling(config, TOKENIZER), validation_sampling(config, TOKENIZER)


def test_validation_ends_answers_as_training_does_and_draws_greedily():
    words = (f"{R}.stop=END", f"{R}.stop_token_ids=[40]", f"{R}.min_new_tokens=3", f"{R}.min_p=0.1")
    training, validation = samplings(*words)
    for sampling in (training, validation):
        assert sampling.stop_strings == ("END",)
        assert sampling.stop_ids == TOKENIZER.stop_ids | {40}
        assert sampling.min_new_tokens == 3
        assert sampling.max_new_tokens == 512
    assert (training.min_p, training.temperature) == (0.1, 1.0)
    assert (validation.min_p, validation.temperature) == (0.0, 0.0)


def test_validation_may_have_its_own():
    own = f"{R}.val_kwargs"
    _, validation = samplings(
        f"{R}.stop=END",
        f"{R}.min_new_tokens=3",
        f"{own}.stop=[]",
        f"{own}.stop_token_ids=[41, 42]",
        f"{own}.min_new_tokens=0",
        f"{own}.max_new_tokens=100",
        f"{own}.do_sample=true",
        f"{own}.temperature=0.6",
        f"{own}.min_p=0.2",
    )
    assert validation.stop_strings == ()
    assert validation.stop_ids == TOKENIZER.stop_ids | {41, 42}
    assert (validation.min_new_tokens, validation.max_new_tokens) == (0, 100)
    assert (validation.temperature, validation.min_p) == (0.6, 0.2)


def test_nothing_is_drawn_otherwise_by_default():
    training, validation = samplings()
    assert not training.is_truncated
    assert not validation.is_truncated
    assert training.stop_ids == validation.stop_ids == TOKENIZER.stop_ids
    assert training.stop_strings == validation.stop_strings == ()


@pytest.mark.parametrize("block", [R, f"{R}.val_kwargs"])
def test_a_stop_token_that_is_no_id_is_refused(block: str):
    with pytest.raises(UserError, match="0 to 127") as caught:
        samplings(f"{block}.stop_token_ids=[128]")
    assert caught.value.field == f"{block}.stop_token_ids"


def said(*words: str, temperature: float = 0.0) -> tuple[str, list[str]]:
    """What the built-in model says in a chat, and the pieces in which it was shown."""
    pieces: list[str] = []
    opened = open_checkpoint("builtin://arithmetic", words)
    talk = ChatSession(opened, system=None, temperature=temperature, max_tokens=40)
    return talk.say("12+34=", show=pieces.append), pieces


def test_a_chat_ends_its_answers_as_validation_does():
    assert said()[0] == "46"
    assert said(f"{R}.stop=['4']")[0] == "4"
    assert said(f"{R}.val_kwargs.stop=['4']")[0] == "4"
    ids = TOKENIZER.encode("4")
    assert said(f"{R}.stop_token_ids={ids}")[0] == "4"
    assert len(said(f"{R}.min_new_tokens=30")[0]) >= 30


def test_a_chat_shows_every_token_of_a_long_answer_as_it_comes():
    long, pieces = said(temperature=9.0)
    assert len(long) > 24
    assert len(pieces) > 24
    assert "".join(pieces) == long


@pytest.mark.parametrize(
    ("given", "system"), [(None, "Be brief."), ("Be long.", "Be long."), ("", None)]
)
def test_a_chat_begins_with_the_system_prompt_of_the_run(given: str | None, system: str | None):
    opened = open_checkpoint("builtin://arithmetic", ["data.system_prompt=Be brief."])
    talk = ChatSession(opened, system=given, temperature=0.0, max_tokens=4)
    wanted = [] if system is None else [{"role": "system", "content": system}]
    assert talk.messages == wanted
