"""The critic's model: it starts at 0 and reads each sequence by itself."""

import torch

from luyen.models.policy import ValueModel
from tests.tiny_models import tiny_policy

TOKENS = torch.arange(3, 23)
MASK = torch.arange(20) % 3 > 0


def critic(**changes) -> ValueModel:
    return ValueModel(tiny_policy(**changes))


def test_the_first_values_are_zero():
    assert critic()(TOKENS, [11, 9], MASK.clone()).tolist() == [0.0] * int(MASK.sum())


def test_a_value_looks_at_what_stands_before_its_token():
    model = critic()
    torch.nn.init.normal_(model.value.weight)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[7] = True
    [before] = model(TOKENS, [20], mask).tolist()
    later = TOKENS.clone()
    later[7:] = 5
    assert model(later, [20], mask).tolist() == [before]
    later[6] = 5
    assert model(later, [20], mask).tolist() != [before]


def test_values_do_not_depend_on_the_batch():
    model = critic()
    torch.nn.init.normal_(model.value.weight)
    mask = torch.tensor([i not in (0, 11) for i in range(20)])
    together = model(TOKENS, [11, 9], mask)
    first = model(TOKENS[:11], [11], mask[:11])
    second = model(TOKENS[11:], [9], mask[11:])
    assert torch.equal(together, torch.cat([first, second]))
    assert together.dtype == torch.float32


def test_an_output_layer_it_never_uses_is_not_trained():
    untied = critic(tie_word_embeddings=False)
    assert not untied.body.head.linear.weight.requires_grad
    assert untied.body.model.get_input_embeddings().weight.requires_grad
    tied = critic(tie_word_embeddings=True)
    assert tied.body.head.linear.weight is tied.body.model.get_input_embeddings().weight
    assert tied.body.head.linear.weight.requires_grad


def test_a_frozen_tied_embedding_stays_frozen():
    policy = tiny_policy(tie_word_embeddings=True).requires_grad_(False)
    ValueModel(policy)
    assert not any(p.requires_grad for p in policy.parameters())
