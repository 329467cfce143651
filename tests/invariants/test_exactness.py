"""Log-probabilities of the sampler and of the packed training forward are the same bits.

The sampler decodes token by token in one batch; the trainer reads whole sequences in another. In
fp32 on this kind of processor not one bit may differ, whatever lengths, batches and threads are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from luyen.base import process_setup
from luyen.config.schema.model import ModelConfig
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from tests.generation import Pair, native, packed_logps, pairs, request, sampled_logps
from tests.tiny_models import KINDS, VOCABULARY, tiny_net, tiny_policy

pytestmark = pytest.mark.skipif(
    not process_setup.is_promised("float32"), reason="exactness is not promised on this machine"
)
NOT_PROMISED: dict[str, tuple[bool, str]] = {
    "odd head": (
        not process_setup.has_mkl(),
        "cosines are computed in vectors that one position fills, or shares with the next",
    ),
    "gpt_oss": (
        process_setup.least_rows() > 1,
        "experts multiply by themselves, sometimes a few rows",
    ),
}
"""Whether this is not promised on this machine, and why."""
LENGTHS = (1, 2, 17, 31, 32, 33, 63, 65, 100, 129, 200, 255, 257)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def demand_promised(what: str) -> None:
    """Skip what is not promised on this machine."""
    is_missing, why = NOT_PROMISED.get(what, (False, ""))
    if is_missing:
        pytest.skip(why)


def drawn(policy: Policy, lengths: Sequence[int], *, new: int = 12, **sampling: Any) -> list[Pair]:
    """Answers to prompts of these lengths, decoded five at a time."""
    asked = [request(n, new, samples=2, **sampling) for n in lengths]
    return pairs(asked, generate(native(policy, rows=5), asked))


def gap(policy: Policy, answers: Sequence[Pair], *, at_once: int = 7, **options: Any) -> float:
    """Largest difference, when the trainer reads `at_once` sequences a pass in reverse order."""
    backwards = list(reversed(answers))
    parts = [backwards[i : i + at_once] for i in range(0, len(backwards), at_once)]
    trained = torch.cat([packed_logps(policy, part, **options) for part in parts])
    said = sampled_logps(backwards)
    assert said.std() > 0.3, "log-probabilities too much alike to prove anything"
    return float((trained - said).abs().max())


SHAPES: dict[str, dict[str, Any]] = {
    "every head its own keys": {"num_key_value_heads": 4},
    "two heads share keys": {},
    "three heads share keys": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2
    },
    "head of 32": {"head_dim": 32},
    "head of 64": {"head_dim": 64},
    "odd intermediate": {"intermediate_size": 341},
    "odd head": {"head_dim": 18, "hidden_size": 72, "intermediate_size": 100},
    "tied": {"tie_word_embeddings": True},
    "odd vocabulary": {"vocab_size": 1003, "vocabulary": 997},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_differs_for_any_shape(shape: str, threads: int):
    demand_promised(shape)
    torch.set_num_threads(threads)
    policy = tiny_policy(**SHAPES[shape])
    lengths = LENGTHS if threads == 1 else (1, 33, 129, 257)
    answers = drawn(policy, lengths, new=12 if threads == 1 else 5)
    with torch.no_grad():
        assert gap(policy, answers) == 0
    # All at once: enough numbers for several threads.
    assert gap(policy, answers, at_once=len(answers)) == 0


@pytest.mark.parametrize("at_once", [1, 2, 26])
def test_no_bit_differs_for_any_batch(at_once: int):
    policy = tiny_policy()
    assert gap(policy, drawn(policy, LENGTHS), at_once=at_once) == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_no_bit_differs_at_any_temperature(temperature: float):
    policy = tiny_policy(initializer_range=0.15)
    answers = drawn(policy, (1, 20, 70), temperature=temperature)
    assert gap(policy, answers, temperature=temperature) == 0


def test_no_bit_differs_with_gradients_and_checkpointed_layers():
    policy = tiny_policy()
    answers = drawn(policy, LENGTHS[:8])
    policy.train()
    assert gap(policy, answers) == 0
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert policy.model.base_model.gradient_checkpointing
    assert gap(policy, answers) == 0


def with_adapter(**changes: Any) -> Policy:
    net = tiny_net(**changes)
    add_adapter(net, ModelConfig(lora_rank=4, lora_alpha=8.0))
    policy = Policy(net, vocabulary=VOCABULARY).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return policy


@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_differs_with_an_adapter(threads: int):
    torch.set_num_threads(threads)
    policy = with_adapter()
    answers = drawn(policy, (1, 31, 65, 129), new=6)
    assert gap(policy, answers) == 0
    with torch.no_grad():
        next(p for n, p in policy.named_parameters() if "lora_B" in n).add_(0.01)
    assert gap(policy, answers) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_differs_for_any_architecture(kind: str):
    demand_promised(kind)
    policy = tiny_policy(kind)
    answers = drawn(policy, (1, 3, 17, 40, 70), new=20)
    assert gap(policy, answers) == 0


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_no_bit_differs_in_long_sequences(kind: str):
    demand_promised(kind)
    changes = {} if kind == "llama" else {"sliding_window": 300}
    policy = tiny_policy(kind, **changes)
    answers = drawn(policy, (300, 510, 1050), new=6)
    assert gap(policy, answers) == 0


def test_a_changed_weight_shows():
    policy = tiny_policy()
    answers = drawn(policy, (5, 40))
    assert gap(policy, answers) == 0
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[answers[0][0][0]] += 1e-3
    assert gap(policy, answers) > 0


def test_answers_drawn_after_an_update_are_exact_again():
    policy = tiny_policy()
    engine = native(policy, rows=3)
    asked = [request(n, 8, samples=2) for n in (3, 40)]
    generate(engine, asked)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    assert gap(policy, pairs(asked, generate(engine, asked))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_sweep(shape: str, threads: int):
    demand_promised(shape)
    torch.set_num_threads(threads)
    policy = tiny_policy(**SHAPES[shape])
    everything = [*range(1, 300, 1 if threads == 1 else 7), 400, 511, 513, 640, 768, 1000, 1100]
    for lengths in _some(everything, 24):
        answers = drawn(policy, lengths, new=5)
        for at_once in (1, 3, 48):
            assert gap(policy, answers, at_once=at_once) == 0


def _some(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
