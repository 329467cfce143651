"""A byte-level tokenizer with merges, as most open models have one, trained on a few lines."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    '{"name": "calculator", "arguments": {"expression": "12 + 34"}}',
    '{"city": "Hà Nội", "temperature": 31.5, "is_raining": false, "hours": [1, 2, 3]}',
    "The answer is true, false or null; it is not known yet.",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2


def build_byte_pair_tokenizer(directory: Path, *, marks: tuple[str, ...] = ()) -> None:
    """Write a tokenizer whose turns end with `<|im_end|>`; `marks` are more special tokens."""
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in marks])
    (directory / "tokenizer.json").write_text(backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[END]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
