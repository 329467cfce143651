"""The policy that is served: loaded for inference, with everything that requests are read with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.models.policy import Policy
from luyen.models.weights import tensor_digests
from luyen.pipeline.policy_loading import LoadedPolicy, open_checkpoint
from luyen.rollout.build import tool_parsers
from luyen.rollout.engines import hf, native
from luyen.rollout.parsers.protocol import ToolParser
from luyen.rollout.protocol import RolloutEngine
from luyen.serve.calls import BodyLimits

_LONGEST = 32_768
"""Tokens of a sequence, where the options name none and the model could read more."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """A policy under the name that clients call it by.

    Example:
        >>> sorted(ServedModel.__slots__)[:3]
        ['digest', 'loaded', 'max_model_len']
    """

    name: str
    """Name in requests and replies."""
    loaded: LoadedPolicy
    """Policy, tokenizer and configuration."""
    renderer: Renderer
    """Its chat template."""
    parser: ToolParser
    """Reads tool calls in the format of the run (`multi_turn.format`)."""
    max_model_len: int
    """Most tokens of prompt and answer."""
    digest: str
    """Hash of all weights: `system_fingerprint` of replies."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.loaded.tokenizer

    @property
    def tool_format(self) -> str:
        """Name of that format."""
        return self.loaded.config.actor_rollout_ref.rollout.multi_turn.format

    @property
    def limits(self) -> BodyLimits:
        """Bounds of requests to it."""
        vocabulary = min(self.tokenizer.size, self.loaded.policy.head.vocabulary)
        return BodyLimits(vocabulary=vocabulary, max_model_len=self.max_model_len)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: the model's, and those that its run added."""
        more = self.loaded.config.actor_rollout_ref.rollout.stop_token_ids
        return self.tokenizer.stop_ids | {i for i in more if i < self.tokenizer.size}


def open_model(
    path: str, *, name: str | None, overrides: Sequence[str], is_trusted: bool
) -> ServedModel:
    """Load a checkpoint, a run's newest one or a model; `name` None: the path."""
    loaded = open_checkpoint(path, overrides, is_trusted=is_trusted)
    data, rollout = loaded.config.data, loaded.config.actor_rollout_ref.rollout
    return ServedModel(
        name=name or path,
        loaded=loaded,
        renderer=Renderer(loaded.tokenizer, template_kwargs=data.apply_chat_template_kwargs),
        parser=tool_parsers.get(rollout.multi_turn.format),
        max_model_len=_longest(loaded.policy, rollout),
        digest=weight_digest(loaded.policy),
    )


def with_weights(model: ServedModel, path: str, *, is_trusted: bool) -> ServedModel:
    """The model with the weights of another checkpoint; what clients see of it stays.

    A UserError where its tokenizer is another one or it reads less: requests that wait were made
    for the present one.
    """
    model_block = model.loaded.config.actor_rollout_ref.model
    dtype = [f"actor_rollout_ref.model.dtype={model_block.dtype}"]
    try:
        loaded = open_checkpoint(path, dtype, is_trusted=is_trusted)
    except torch.OutOfMemoryError:
        why = "the device has no room for a second copy of the model"
        raise UserError("path", path, why, "start with a lower --gpu-memory-utilization") from None
    difference = model.tokenizer.difference(loaded.tokenizer)
    if difference is None and model.tokenizer.fingerprint() != loaded.tokenizer.fingerprint():
        difference = "its rules or its chat template differ"
    if difference is not None:
        why = f"its tokenizer is not that of the served model: {difference}"
        raise UserError("path", path, why, "start another server for it")
    positions = _positions(loaded.policy)
    if positions is not None and positions < model.max_model_len:
        why = f"it reads {positions} tokens, and this server promises {model.max_model_len}"
        raise UserError("path", path, why, "start another server for it")
    rollout = model.loaded.config.actor_rollout_ref.rollout
    arr = loaded.config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    config = loaded.config.model_copy(update={"actor_rollout_ref": arr})
    loaded = replace(loaded, config=config)
    return replace(model, loaded=loaded, digest=weight_digest(loaded.policy))


def build_engine(model: ServedModel) -> RolloutEngine:
    """The embedded engine over the model's policy."""
    rollout = model.loaded.config.actor_rollout_ref.rollout
    changes: Mapping[str, Any] = {
        "max_model_len": model.max_model_len,
        # A prompt is prefilled in one pass.
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, model.max_model_len),
        # Requests arrive while earlier ones run, as those of conversations do.
        "multi_turn": rollout.multi_turn.model_copy(update={"enable": True}),
    }
    rollout = rollout.model_copy(update=changes)
    make = native if model.loaded.policy.is_packed else hf
    decode = partial(model.tokenizer.decode, skip_special=False)
    return make(model.loaded.policy, rollout, longest=model.max_model_len, decode=decode)


def weight_digest(module: nn.Module) -> str:
    """One hash of all parameters: equal weights give equal ones on every machine."""
    return f"fp_{hash_value(tensor_digests(dict(module.named_parameters())))[:16]}"


def _positions(policy: Policy) -> int | None:
    config: Any = policy.model.config.get_text_config()
    return config.to_dict().get("max_position_embeddings")


def _longest(policy: Policy, rollout: RolloutConfig) -> int:
    """Most tokens of a sequence: as the options say, or as many as the model reads."""
    positions, wanted = _positions(policy), rollout.max_model_len
    if wanted is not None and positions is not None and wanted > positions:
        why = f"the model reads at most {positions} tokens (max_position_embeddings)"
        raise UserError("--max-model-len", wanted, why, "lower it")
    return wanted or min(_LONGEST, positions or _LONGEST)
