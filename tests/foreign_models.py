"""Folders of small random models whose architecture the fast path may not know, ready to train."""

import shutil
from pathlib import Path
from typing import Any

import torch

from luyen.data.tokenizer import resolve_path
from tests.tiny_models import tiny_net

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "falcon": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 4, "time_step_rank": 4},
}
"""Architectures of transformers, and what makes them small."""

_OWN_CODE = '''
import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own-averages"

    def __init__(self, vocab_size=128, hidden_size=32, num_hidden_layers=2, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    """A token sees the mean of all before it: causal, without attention, base or cache."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.Linear(2 * width, width) for _ in range(config.num_hidden_layers)
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, **kwargs):
        states = self.words(input_ids)
        count = torch.arange(1, states.shape[1] + 1, device=states.device)[None, :, None]
        for block in self.blocks:
            mean = states.cumsum(1) / count
            states = states + torch.tanh(block(torch.cat([states, mean], -1)))
        return CausalLMOutput(logits=self.lm_head(states))
'''


def foreign_model(kind: str, folder: Path) -> Path:
    """A folder with weights, config and the built-in tokenizer; `own` brings its own code."""
    folder.mkdir(parents=True)
    if kind == "own":
        _write_own(folder)
    else:
        tiny_net(kind, **{**_COMMON, **KINDS[kind]}).save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(Path(resolve_path("builtin://arithmetic")) / name, folder / name)
    return folder


def mixture(folder: Path) -> Path:
    """A folder of a small Qwen3-MoE, which the fast path knows."""
    tiny_net("qwen3_moe", **{**_COMMON, "head_dim": 16}).save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(Path(resolve_path("builtin://arithmetic")) / name, folder / name)
    return folder


def _write_own(folder: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(_OWN_CODE, names)
    net = names["OwnForCausalLM"](names["OwnConfig"](eos_token_id=3, pad_token_id=1))
    net.config.auto_map = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    net.config.architectures = ["OwnForCausalLM"]
    net.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(_OWN_CODE)
