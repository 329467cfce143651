"""The reward model of a run in this process, and how a run opens the one it has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import final

import torch

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.reward import RewardModelConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.engine.batch import BatchShard, PackedBatch, by_tokens, pack
from luyen.engine.reward_model import JUDGED, SCORES, score_shard
from luyen.models.load import choose_threads
from luyen.models.offload import OffloadedWeights
from luyen.models.reward_model import RewardModel, RewardModelFacts, load_reward_model, read_facts
from luyen.rewards.reward_model import LearnedReward, ModelInput, Scorer, reader_for

_BLOCK = "reward.reward_model"
_PATH = f"{_BLOCK}.model_path"


_BUDGET = "reward.reward_model.rollout.max_num_batched_tokens"


@final
class LocalScorer:
    """A reward model on one device. Scores of an input do not depend on the rest of the batch."""

    is_remote = False

    def __init__(
        self, model: RewardModel, *, max_tokens: int, max_sequences: int, is_resting: bool = False
    ) -> None:
        """With `is_resting`, weights are in host memory between calls of `score`."""
        self._model: RewardModel | None = model.requires_grad_(False)
        self._device = model.device
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._resting = OffloadedWeights(model) if is_resting else None

    def score(self, inputs: Sequence[ModelInput]) -> list[tuple[float, ...]]:
        """For each input the score of every token in `ModelInput.judged`, in order."""
        assert self._model is not None, "the reward model was closed"
        batch = _packed(inputs)
        everything = torch.arange(len(batch.tokens))
        shard = BatchShard(batch=batch, passes=tuple(self._passes(batch)), positions=everything)
        with self._resting.awake() if self._resting is not None else nullcontext():
            stream = score_shard(self._model, shard, device=self._device)[SCORES]
        numbers = iter(stream[batch.streams[JUDGED].bool()].tolist())
        return [tuple(next(numbers) for _ in one.judged) for one in inputs]

    def close(self) -> None:
        """Release the model. Closing twice is allowed."""
        self._model = self._resting = None

    def _passes(self, batch: PackedBatch) -> Iterator[tuple[int, ...]]:
        for part in by_tokens(
            batch.lengths, budget=self._max_tokens, groups=batch.labels(), field=_BUDGET
        ):
            for first in range(0, len(part), self._max_sequences):
                yield tuple(part[first : first + self._max_sequences])


def _packed(inputs: Sequence[ModelInput]) -> PackedBatch:
    """The inputs as a packed batch; responses to one prompt are a group, which shares it."""
    prompts = {one.tokens[: one.prompt]: 0 for one in inputs}
    labels = {prompt: number for number, prompt in enumerate(prompts)}
    batch = pack(
        [one.tokens for one in inputs],
        masks=[[place >= max(one.prompt, 1) for place in range(len(one.tokens))] for one in inputs],
        groups=[labels[one.tokens[: one.prompt]] for one in inputs],
    )
    judged, start = torch.zeros(len(batch.tokens)), 0
    for one in inputs:
        judged[[start + place for place in one.judged]] = 1.0
        start += len(one.tokens)
    return batch.with_streams(**{JUDGED: judged})


def load_scorer(reward_model: RewardModelConfig, device: str, *, is_alone: bool) -> LocalScorer:
    """Load the model; with `is_alone` no other role uses the device."""
    assert reward_model.model_path is not None, "check demands it"
    model = ModelConfig(path=reward_model.model_path, enable_gradient_checkpointing=False)
    loaded = load_reward_model(model, device=device, field=_PATH)
    choose_threads(loaded)
    offload = not is_alone if reward_model.param_offload is None else reward_model.param_offload
    return LocalScorer(
        loaded,
        max_tokens=reward_model.rollout.max_num_batched_tokens,
        max_sequences=reward_model.rollout.max_num_seqs,
        is_resting=offload and device == "cuda",
    )


def open_learned_reward(
    reward_model: RewardModelConfig, policy: Renderer, start: Callable[[], Scorer]
) -> LearnedReward:
    """The learned reward of a run; configuration errors are raised before `start` loads weights.

    `policy` renders the policy's conversations.
    """
    assert reward_model.model_path is not None, "check demands it"
    facts = read_facts(reward_model.model_path, field=_PATH)
    _refuse_other_use(facts, reward_model)
    try:
        own = Renderer(load_tokenizer(reward_model.model_path))
    except UserError as error:
        fix = "put its tokenizer into the folder of the model"
        raise UserError(_PATH, error.value, error.why, fix) from error
    reader = reader_for(own, policy, is_stepwise=reward_model.steps is not None)
    longest = _longest(facts, reward_model)
    return LearnedReward(start(), reader, longest=longest, steps=reward_model.steps)


def _refuse_other_use(facts: RewardModelFacts, reward_model: RewardModelConfig) -> None:
    """Raise a UserError if a process reward model is to score whole answers, or vice versa."""
    if facts.is_stepwise and reward_model.steps is None:
        why = "it was trained to score steps, and the run scores whole answers"
        raise UserError(_PATH, reward_model.model_path, why, f"set {_BLOCK}.steps=min")
    if facts.is_stepwise is False and reward_model.steps is not None:
        why = "the model was trained to score whole answers, and the run scores steps"
        raise UserError(f"{_BLOCK}.steps", reward_model.steps, why, "set it to null")


def _longest(facts: RewardModelFacts, reward_model: RewardModelConfig) -> int:
    """Most tokens of a conversation."""
    rollout, positions = reward_model.rollout, facts.positions
    limit, budget = rollout.max_model_len, rollout.max_num_batched_tokens
    if limit is not None and positions is not None and limit > positions:
        why = f"the model reads at most {positions} tokens (max_position_embeddings)"
        raise UserError(f"{_BLOCK}.rollout.max_model_len", limit, why, "lower it, or drop the line")
    return min(n for n in (limit, positions, budget) if n is not None)
