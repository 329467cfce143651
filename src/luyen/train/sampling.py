"""How training and validation draw: from the configuration to what an engine is asked for."""

from luyen.base.errors import UserError
from luyen.config.schema.run import RunConfig
from luyen.data.tokenizer import Tokenizer
from luyen.rollout.protocol import Sampling

_ROLLOUT = "actor_rollout_ref.rollout"


def training_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """How training draws."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_new_tokens=rollout.min_new_tokens,
        stop_ids=_stop_ids(rollout.stop_token_ids, tokenizer, f"{_ROLLOUT}.stop_token_ids"),
        stop_strings=rollout.stop,
    )


def validation_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """How validation draws: greedily unless `val_kwargs.do_sample`, and ending as training does."""
    rollout = config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    ids, floor, stop = val_kwargs.stop_token_ids, val_kwargs.min_new_tokens, val_kwargs.stop
    own = f"{_ROLLOUT}.{'' if ids is None else 'val_kwargs.'}stop_token_ids"
    most = config.data.max_response_length
    return Sampling(
        max_new_tokens=min(most, val_kwargs.max_new_tokens or most),
        temperature=val_kwargs.temperature if val_kwargs.do_sample else 0.0,
        top_k=val_kwargs.top_k if val_kwargs.do_sample else -1,
        top_p=val_kwargs.top_p if val_kwargs.do_sample else 1.0,
        min_p=val_kwargs.min_p if val_kwargs.do_sample else 0.0,
        min_new_tokens=rollout.min_new_tokens if floor is None else floor,
        stop_ids=_stop_ids(rollout.stop_token_ids if ids is None else ids, tokenizer, own),
        stop_strings=rollout.stop if stop is None else stop,
    )


def _stop_ids(more: tuple[int, ...], tokenizer: Tokenizer, field: str) -> frozenset[int]:
    """The tokenizer's own and the configuration's; a UserError for what is no id."""
    unknown = [i for i in more if i >= tokenizer.size]
    if unknown:
        why = f"the tokenizer knows the ids 0 to {tokenizer.size - 1}"
        raise UserError(field, unknown[0], why, "name ids of this model's tokenizer")
    return tokenizer.stop_ids | {*more}
