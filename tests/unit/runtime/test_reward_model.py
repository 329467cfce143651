"""A learned reward in this process: what it reads, what it refuses, and what it leaves behind."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.config.schema.reward import RewardConfig
from luyen.models.offload import OffloadedWeights
from luyen.rewards.build import build_reward
from luyen.rewards.protocol import Reward, Services, StepReward
from luyen.rewards.reward_model import AS_SAMPLED, BY_STEP, RENDERED, LearnedReward
from luyen.runtime.reward_model import open_learned_reward
from tests.tiny_models import read_judge_net, tiny_judge_net
from tests.unit.runtime.judges import groups, renderer, saved_judge, scorer_of, settings

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> str:
    return saved_judge(tmp_path_factory.mktemp("judge"))


def opened(path: str, *, steps: str | None = None, **rollout: int) -> LearnedReward:
    block = settings(path, **rollout).model_copy(update={"steps": steps})
    return open_learned_reward(block, renderer(), partial(scorer_of, path))


def judged(reward: LearnedReward, given=None) -> list[list[Score]]:
    found = asyncio.run(reward.score_step(given or groups()))
    reward.close()
    reward.close()
    return found


def values(found: list[list[Score]]) -> list[float]:
    numbers = [score.value for row in found for score in row]
    assert None not in numbers
    return [number for number in numbers if number is not None]


def by_transformers(path: str, texts: list[str]) -> list[float]:
    net, own = read_judge_net(Path(path)), renderer().tokenizer
    with torch.no_grad():
        return [float(net(torch.tensor([own.encode(text)])).logits[0, 0]) for text in texts]


def written(template: str) -> list[str]:
    return [
        template.format(q=asked.messages[-1]["content"], a=rollout.text)
        for asked, rollouts in groups()
        for rollout in rollouts
    ]


def test_the_same_tokenizer_reads_the_tokens_and_closes_the_turn(judge: str):
    """As transformers scores the whole conversation as the template writes it."""
    reward = opened(judge)
    assert isinstance(reward, StepReward)
    held: Reward = reward
    assert (reward.way, held.names) == (AS_SAMPLED, ("reward_model",))
    found = values(judged(reward))
    texts = written("<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n")
    assert found == pytest.approx(by_transformers(judge, texts), rel=1e-4, abs=1e-4)
    assert len({round(x, 3) for x in found}) == 6
    cut_off = values(judged(opened(judge), groups(is_ended=False)))
    assert cut_off == found, "an answer that was cut off is closed as any other"


def test_another_template_is_the_reward_models_own(tmp_path: Path):
    path = saved_judge(tmp_path, template=PLAIN)
    reward = opened(path)
    assert reward.way == RENDERED
    texts = written("user: {q}<|im_end|>assistant: {a}<|im_end|>")
    assert values(judged(reward)) == pytest.approx(by_transformers(path, texts), rel=1e-4, abs=1e-4)


def test_scores_do_not_depend_on_passes_or_groups(judge: str):
    whole = values(judged(opened(judge)))
    for limits in ({"max_num_seqs": 1}, {"max_num_seqs": 4}, {"max_num_batched_tokens": 40}):
        assert values(judged(opened(judge, **limits))) == whole
    reward = opened(judge)
    alone = [asyncio.run(reward(asked, rollouts)) for asked, rollouts in groups()]
    assert values(alone) == whole


def test_a_conversation_that_is_too_long_is_a_fault_and_never_cut(judge: str):
    (first, second), others = groups()[0], groups()[1:]
    longest = max(len(r.tokens) for r in second)
    found = judged(opened(judge, max_model_len=longest), [(first, second), *others])
    errors = [score.error for row in found for score in row if score.value is None]
    assert errors
    assert all(f"reads at most {longest}" in str(error) for error in errors)
    assert any(score.value is not None for row in found for score in row)


def test_a_score_that_is_no_number_is_a_fault(judge: str):
    class Broken:
        is_remote = False

        def score(self, inputs):
            return [(float("nan"),) for _ in inputs]

        def close(self):
            pass

    reward = open_learned_reward(settings(judge), renderer(), Broken)
    found = judged(reward)
    assert {score.error for row in found for score in row} == {"the reward model gave nan"}


@pytest.mark.parametrize("steps", ["min", "mean", "product"])
def test_a_process_reward_model_judges_lines(tmp_path: Path, steps: str):
    path = saved_judge(tmp_path, is_stepwise=True)
    asked, rollouts = groups()[0]
    lines = [replace(rollouts[0], text="1+1=2\n2"), replace(rollouts[0], text="1+1=2\n\n2\n")]
    reward = opened(path, steps=steps)
    assert reward.way == BY_STEP
    found = values(judged(reward, [(asked, lines)]))
    assert found[0] == found[1], "empty lines are no steps"
    start = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    ends = by_transformers(path, [start + "1+1=2\n", start + "1+1=2\n2\n"])
    first, second = (1 / (1 + 2.718281828459045**-x) for x in ends)
    expected = {
        "min": min(first, second),
        "mean": (first + second) / 2,
        "product": first * second,
    }
    assert found[0] == pytest.approx(expected[steps], rel=1e-4)


def test_a_model_is_used_for_what_it_was_trained_for(judge: str, tmp_path: Path):
    with pytest.raises(UserError, match="trained to score whole answers"):
        opened(judge, steps="min")
    with pytest.raises(UserError, match="trained to score steps"):
        opened(saved_judge(tmp_path, is_stepwise=True))
    with pytest.raises(UserError, match="reads at most 512 tokens"):
        opened(judge, max_model_len=513)
    (tmp_path / "bare").mkdir()
    tiny_judge_net().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError) as caught:
        opened(str(tmp_path / "bare"))
    assert caught.value.field == "reward.reward_model.model_path"


def test_it_is_the_reward_when_nothing_else_is_written_and_a_part_otherwise(judge: str):
    alone = RewardConfig.model_validate({"reward_model": {"enable": True, "model_path": judge}})
    beside = RewardConfig.model_validate(
        {
            "components": {
                "learned": {"model": "reward_model", "weight": 2.0},
                "brief": {"rule": "length", "weight": 0.0},
            },
            "reward_model": {"enable": True, "model_path": judge},
        }
    )
    expected = values(judged(opened(judge)))
    for config, name, weight in ((alone, "reward_model", 1.0), (beside, "learned", 2.0)):
        reward = opened(judge)
        services = Services(model=reward)
        with build_reward(config, max_response_length=16, services=services) as built:
            scored = built.score(groups())
        reward.close()
        trees = [score for group in scored for score in group.scores]
        assert [t.value for t in trees] == pytest.approx([weight * x for x in expected])
        assert {t.parts[0].name for t in trees} == {name}


def test_weights_that_rest_come_back_to_the_bit():
    net = tiny_judge_net()
    tied = torch.nn.Linear(3, 4)
    tied.weight.data = net.get_parameter("score.weight").data[:, :12].view(4, 3)
    both = torch.nn.ModuleList([net, tied])
    before = {name: p.detach().clone() for name, p in both.named_parameters()}
    resting = OffloadedWeights(both)
    assert {p.untyped_storage().size() for p in both.parameters()} == {0}
    for _ in range(2):
        with resting.awake():
            assert all(torch.equal(p, before[name]) for name, p in both.named_parameters())
            assert tied.weight.data_ptr() == net.get_parameter("score.weight").data_ptr()
        assert {p.untyped_storage().size() for p in both.parameters()} == {0}
