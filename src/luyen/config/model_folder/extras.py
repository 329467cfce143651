"""Tensors that checkpoints hold and a decoder does not read: which of them are harmless, and why.

Anything else in a file that the model has no place for is refused: it would be dropped in silence.
"""

import re
from collections.abc import Iterable

HARMLESS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)rotary_emb\.inv_freq$", "rotary frequencies, which follow from config.json"),
    (r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias)$", "causal masks of older GPT files"),
    (r"(^|\.)position_ids$", "a count from 0, which older files keep"),
    (r"(^|\.)(mtp|mtp_layers|mtp_block|nextn|eagle)\.", "heads that predict several tokens"),
    (
        r"(^|\.)(visual|vision_tower|vision_model|vision_embed_tokens|embed_vision|"
        r"image_newline|multi_modal_projector|mm_projector|audio_tower|embed_audio|"
        r"speech_encoder|talker|token2wav)(\.|$)",
        "parts that see or hear: rows are text",
    ),
    (r"^(score|classifier|v_head|value_head)\.", "the head of a reward model or a critic"),
    (
        r"^(lm_head|embed_out)\.(weight|bias)$",
        "an output layer where nothing is written, or a tied copy",
    ),
)
"""Pattern of a name, and why it may be left out."""
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern, _ in HARMLESS))
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_STEMS = ("layers", "h", "blocks", "block")
"""What the list of decoder layers is called."""


def is_harmless(name: str) -> bool:
    """Whether a tensor may be left out.

    Example:
        >>> is_harmless("visual.blocks.0.norm1.weight"), is_harmless("model.layers.9.mlp.weight")
        (True, False)
    """
    return _PATTERN.search(name) is not None


def layers_in(names: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of decoder layers by the name of their list.

    Example:
        >>> layers_in(["model.layers.0.mlp.up_proj.weight", "visual.blocks.4.norm1.weight"])
        {'model.layers': {0}}
    """
    found: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        if match and match[1].rpartition(".")[2] in _STEMS and not is_harmless(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def is_predicting_ahead(name: str, layers: int, ahead: int) -> bool:
    """Whether a tensor belongs to layers after the last, which predict several tokens.

    Example:
        >>> is_predicting_ahead("model.layers.61.eh_proj.weight", 61, 1)
        True
    """
    match = _LAYER.match(name)
    return match is not None and layers <= int(match[2]) < layers + ahead
