"""A driver over a model's folder, as a server would load it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from luyen.models.policy import Policy
from luyen.rollout.native.sequences import Decode
from tests.generation import spell
from tests.peers.driver import EngineDriver


def open_driver(folder: str, *, longest: int = 2048, rows: int = 64) -> EngineDriver:
    """The model with every row of its vocabulary: servers sample from all of them."""
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = tensor.data.clone()  # the file may be written again
    policy = Policy(net, vocabulary=net.config.vocab_size).eval()
    return EngineDriver(
        policy,
        decode=_decoder(folder),
        folder=folder,
        eos_ids=_eos_ids(folder),
        longest=longest,
        rows=rows,
    )


def _decoder(folder: str) -> Decode:
    """How tokens become text; a folder without a tokenizer spells them."""
    if not (Path(folder) / "tokenizer.json").exists():
        return spell
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)


def _eos_ids(folder: str) -> frozenset[int]:
    """Ids that end a text by the generation config, or by the model's."""
    if (Path(folder) / "generation_config.json").exists():
        given: Any = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        given = AutoConfig.from_pretrained(folder).eos_token_id
    return frozenset() if given is None else frozenset([given] if isinstance(given, int) else given)
