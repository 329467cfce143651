"""Whatever the schema and the weights: an answer that ended is valid, every token was allowed."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from luyen.base.seeds import derive_key
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rollout.constraints import json_schema_constraint
from luyen.rollout.protocol import Request, Sampling, completion_fault, generate
from tests.byte_pairs import build_byte_pair_tokenizer
from tests.generation import native, plain_logits
from tests.optional import needs
from tests.tiny_models import tiny_policy

pytestmark = needs("llguidance")

NAMES = ("a", "b c", 'q"', "longer_name")
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.just({"type": "string", "maxLength": 5}),
    st.just({"type": "string", "pattern": "^[a-f]{1,3}$"}),
    st.lists(st.sampled_from(["x", "yes", 3, None, True]), min_size=1, unique_by=str).map(
        lambda values: {"enum": values}
    ),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def closed(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(required & set(properties)),
            "additionalProperties": False,
        }

    names = st.sampled_from(NAMES)
    return st.builds(closed, st.dictionaries(names, inner, max_size=3), st.sets(names))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=5,
)


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "characters":
        return load_tokenizer("builtin://arithmetic")
    folder = Path(tempfile.mkdtemp())
    build_byte_pair_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["characters", "bytes"])
@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0, 2.5]))
def test_an_answer_that_ended_is_valid(kind: str, schema: Any, seed: int, temperature: float):
    words = tokenizer(kind)
    policy = tiny_policy("llama", vocabulary=words.size, vocab_size=384, seed=seed)
    constraint = json_schema_constraint(schema, words)
    sampling = Sampling(max_new_tokens=80, temperature=temperature, stop_ids=words.stop_ids)
    keys = tuple(derive_key(seed, "law", i) for i in range(2))
    asked = Request(id="a", tokens=(5, 9), keys=keys, sampling=sampling, constraint=constraint)
    for done in generate(native(policy), [asked]).values():
        assert done.reason in ("stop", "length")
        assert completion_fault(done, asked, vocabulary=words.size) is None
        if done.reason == "stop":
            spelled = [token for token in done.tokens if token not in words.stop_ids]
            Draft202012Validator(schema).validate(json.loads(words.decode(spelled)))
        if temperature == 0.0:
            state = constraint.start()
            logits = plain_logits(policy, asked.tokens + done.tokens)[1:-1]
            for place, token in enumerate(done.tokens):
                left = logits[place].masked_fill(~state.allowed(), -torch.inf)
                assert token == int(left.argmax())
                state.accept(token)
