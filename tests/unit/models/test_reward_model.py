"""The reward model: transformers' layout, one number per judged token, whatever is beside it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.reward_model import RewardModel, load_reward_model
from tests.tiny_models import read_judge_net, tiny_judge_net, tiny_net

FIELD = "reward.reward_model.model_path"
SEQUENCES = ([3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 9, 8], [11, 12])


def saved_policy(folder: Path, kind: str = "llama", **changes) -> ModelConfig:
    """A language model on disk, as one to start from."""
    tiny_net(kind, **changes).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def read(model: RewardModel, sequences=SEQUENCES, prompt: int = 1) -> torch.Tensor:
    """Scores at the last token of each sequence, in one pass."""
    lengths = [len(s) for s in sequences]
    ends = torch.tensor(lengths).cumsum(0) - 1
    judged = torch.zeros(sum(lengths), dtype=torch.bool)
    judged[ends] = True
    mask = torch.cat([torch.arange(n) >= prompt for n in lengths])
    return model(torch.tensor([t for s in sequences for t in s]), lengths, mask, judged)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt_neox"])
def test_transformers_reads_back_what_was_saved_with_equal_scores(kind: str, tmp_path: Path):
    model = load_reward_model(
        saved_policy(tmp_path / "policy", kind), device="cpu", field=FIELD, new_head=7
    )
    with torch.no_grad():
        model.head.weight.mul_(100)
        ours = read(model)
    model.save(tmp_path / "reward", pad_token=0)
    theirs = read_judge_net(tmp_path / "reward")
    assert theirs.config.num_labels == 1
    longest = max(map(len, SEQUENCES))
    padded = torch.tensor([s + [0] * (longest - len(s)) for s in SEQUENCES])
    with torch.no_grad():
        found = theirs(padded, attention_mask=(padded != 0).long()).logits[:, 0]
    assert found.tolist() == pytest.approx(ours.tolist(), rel=1e-4, abs=1e-5)
    assert len({round(x, 4) for x in ours.tolist()}) == 3, "different answers, different scores"
    again = load_reward_model(ModelConfig(path=str(tmp_path / "reward")), device="cpu", field=FIELD)
    with torch.no_grad():
        assert torch.equal(read(again), ours)


def test_a_model_of_transformers_is_read(tmp_path: Path):
    theirs = tiny_judge_net(seed=3)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        alone = [theirs(torch.tensor([s])).logits[0, 0].item() for s in SEQUENCES]
    ours = load_reward_model(ModelConfig(path=str(tmp_path)), device="cpu", field=FIELD)
    with torch.no_grad():
        assert read(ours).tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> RewardModel:
    folder = tmp_path_factory.mktemp("policy")
    return load_reward_model(saved_policy(folder), device="cpu", field=FIELD, new_head=1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=9), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_a_score_does_not_depend_on_what_is_read_beside_it(tiny, sequences, prompt):
    """Nor on how much of the sequences is shared."""
    with torch.no_grad():
        together = read(tiny, sequences, prompt)
        alone = torch.cat([read(tiny, [s]) for s in sequences])
    assert torch.equal(together, alone)


def test_steps_are_judged_where_they_end_and_see_nothing_later(tiny):
    tokens = torch.tensor(SEQUENCES[0])
    mask = torch.arange(7) > 1
    judged = torch.tensor([0, 0, 0, 1, 0, 1, 0]).bool()
    with torch.no_grad():
        scores = tiny(tokens, [7], mask, judged)
        prefix = read(tiny, [SEQUENCES[0][:4]])
    assert len(scores) == 2
    assert torch.equal(scores[:1], prefix)


def test_a_new_head_is_small_and_decided_by_its_seed(tmp_path: Path):
    model = saved_policy(tmp_path)
    heads = [
        load_reward_model(model, device="cpu", field=FIELD, new_head=seed).head.weight.detach()
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0 < heads[0].abs().max() < 0.1


def refused(model: ModelConfig, **more) -> UserError:
    with pytest.raises(UserError) as caught:
        load_reward_model(model, device="cpu", field=FIELD, **more)
    assert caught.value.field == FIELD
    return caught.value


def test_what_is_no_reward_model_is_refused(tmp_path: Path):
    policy = saved_policy(tmp_path / "policy")
    assert "it is no reward model but LlamaForCausalLM" in str(refused(policy))
    tiny_judge_net(num_labels=3).save_pretrained(tmp_path / "three")
    classes = ModelConfig(path=str(tmp_path / "three"))
    assert "tells 3 classes apart" in str(refused(classes))
    assert "tells 3 classes apart" in str(refused(classes, new_head=0))
    assert "cannot be loaded" in str(refused(ModelConfig(path=str(tmp_path / "nothing"))))


def test_a_head_that_is_missing_from_its_files_is_never_random(tmp_path: Path):
    whole = tiny_judge_net()
    state = {n: t for n, t in whole.state_dict().items() if n != "score.weight"}
    whole.save_pretrained(tmp_path, state_dict=state)
    assert "score.weight" in str(refused(ModelConfig(path=str(tmp_path))))
