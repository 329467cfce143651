"""What a judge is shown, and blocks that cannot judge."""

import pytest

from luyen.base.records import make_prompt
from luyen.config.schema.reward import JudgeConfig
from luyen.rewards.llm_judge.judge_reward import messages_for
from tests.unit.rewards.test_judge import judge


def test_a_conversation_is_shown_with_its_roles():
    asked = make_prompt(
        [
            {"role": "system", "content": "Short."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        ]
    )
    [message] = messages_for(judge("http://a/v1", prompt="{question}|{answer}"), asked, "Ho")
    assert message["content"] == "system: Short.\n\nuser: Hi|Ho"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"base_url": "localhost:80/v1"}, "begins with http"),
        ({"base_url": "http://h:99999/v1"}, "is no address"),
        ({"prompt": "Is {question} good?"}, "does not show {answer}"),
        ({"parse": "choice"}, "choices are needed"),
        ({"choices": {"A": 1.0}}, "choices are needed"),
        ({"parse": "regex"}, "pattern is needed"),
        ({"parse": "regex", "pattern": "("}, "no regular expression"),
        ({"parse": "regex", "pattern": "x"}, "has no group"),
        ({"parse": "choice", "choices": {"A": 1.0}, "scale": [0, 1]}, "scale has no effect"),
        ({"scale": [1, 1]}, "worst must be below best"),
    ],
)
def test_a_block_that_cannot_judge_is_refused(keys, why):
    with pytest.raises(ValueError, match=why):
        JudgeConfig.model_validate({"base_url": "http://h/v1", "prompt": "{answer}"} | keys)
