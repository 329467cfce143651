"""Keys that save memory leave the log-probabilities of sampler and trainer equal, to the bit."""

from dataclasses import replace

import pytest
import torch

from luyen.base import process_setup
from luyen.models import offload
from luyen.models.offload import tile_feed_forward
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from tests.generation import native, packed_logps, pairs, request, sampled_logps
from tests.tiny_models import KINDS, MIXTURES, tiny_policy

pytestmark = pytest.mark.skipif(
    not process_setup.is_promised("float32"), reason="exactness is not promised on this machine"
)
LENGTHS = (1, 2, 17, 33, 65, 100, 200)
DENSE = sorted(set(KINDS) - set(MIXTURES))


def gap(policy: Policy, *, temperature: float = 1.0) -> float:
    """Largest difference, sequences read three at a time with gradients."""
    asked = [request(n, 12, samples=2, temperature=temperature) for n in LENGTHS]
    answers = pairs(asked, generate(native(policy, rows=5), asked))
    policy.train()
    parts = [answers[i : i + 3] for i in range(0, len(answers), 3)]
    trained = torch.cat([packed_logps(policy, part, temperature=temperature) for part in parts])
    said = sampled_logps(answers)
    assert said.std() > 0.2
    return float((trained - said).abs().max())


def saving(kind: str, *, slices: int, **changes: int) -> Policy:
    policy = tiny_policy(kind, **changes)
    tile_feed_forward(policy.model, slices=slices)
    policy.head = replace(policy.head, is_fused=True)
    policy.is_offloading = True
    return policy


@pytest.mark.parametrize("kind", DENSE)
def test_no_bit_differs_for_any_architecture(kind: str):
    assert gap(saving(kind, slices=3)) == 0


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_no_bit_differs_at_any_temperature(temperature: float):
    assert gap(saving("gemma2", slices=4), temperature=temperature) == 0
    assert gap(saving("llama", slices=4), temperature=temperature) == 0


@pytest.mark.parametrize("slices", [2, 5, 64])
def test_no_bit_differs_for_any_slices(slices: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "_ROWS", 1)
    shape = {"vocab_size": 1003, "vocabulary": 997, "intermediate_size": 341}
    assert gap(saving("llama", slices=slices, **shape)) == 0


def test_no_bit_differs_with_checkpointed_layers():
    policy = saving("llama", slices=3)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert gap(policy) == 0
