"""A reward model from a directory or a hub id, or a new one over a language model."""

from dataclasses import dataclass
from typing import Any, final

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from luyen.base.errors import UserError
from luyen.config.model_folder.check import library_faults
from luyen.config.schema.model import Model
from luyen.models.load import dtype_of, leave_the_file, read_config, save_memory
from luyen.models.loading import (
    config_of,
    inspect_folder,
    load_net,
    refuse_gaps,
    refuse_odd_numbers,
)
from luyen.models.reward_model import STEPWISE, RewardModel

_HEAD = "score.weight"
_GIVE = "give a model saved as AutoModelForSequenceClassification with one label"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """What the config of a reward model says, before its weights are read.

    Example:
        >>> RewardModelFacts(positions=2048, is_stepwise=None).positions
        2048
    """

    positions: int | None
    """Most tokens that it can read; None where it does not say."""
    is_stepwise: bool | None
    """Whether it judges steps; None where it was trained elsewhere and does not say."""


def read_facts(path: str, *, field: str) -> RewardModelFacts:
    """What stands in the config; `field` is the key that named the model."""
    source = inspect_folder(Model(path=path), path, field=field, has_head=False)
    config = config_of(source, field=field)
    given: dict[str, Any] = {**config.get_text_config().to_dict(), **config.to_dict()}
    return RewardModelFacts(
        positions=given.get("max_position_embeddings"), is_stepwise=given.get(STEPWISE)
    )


def load_reward_model(
    model: Model, *, device: str, field: str, new_head: int | None = None
) -> RewardModel:
    """The reward model at `model.path`; `field` is the key that named it.

    With `new_head`, a model without a score head gets one, drawn with this seed: small enough that
    all first scores are near 0. Without it such a model is refused: its scores would be noise.
    """
    has_weights = model.init != "random" or new_head is None
    source = inspect_folder(model, model.path, field=field, has_weights=has_weights, has_head=False)
    try:
        net = _load(model, source, dtype_of(model, device), new_head, field)
        torch.nn.Module.to(net, torch.device(device))
        leave_the_file(net)
        refuse_odd_numbers(net, source, field=field)
        made = RewardModel(net)
    except UserError as error:
        raise UserError(field, error.value, error.why, error.fix) from error
    save_memory(net, model)
    made.is_offloading = model.enable_activation_offload
    return made.eval()


def _load(
    model: Model, source: str, dtype: torch.dtype, new_head: int | None, field: str
) -> PreTrainedModel:
    config = read_config(model, source, field=field)
    _refuse_classes(config, source, is_new=new_head is not None)
    config.num_labels = 1
    loader: Any = AutoModelForSequenceClassification
    if model.init == "random" and new_head is not None:
        with (
            library_faults("cannot be made", field=field, path=source, fix=_GIVE),
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(new_head)
            fresh: PreTrainedModel = loader.from_config(config, dtype=dtype)
        _draw_head(fresh, new_head)
        return fresh
    net, found = load_net(loader, model, source, config, dtype=dtype, field=field)
    _refuse_odd_heads(net, source)
    lacking = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
    is_headless = _HEAD in lacking and new_head is not None
    refuse_gaps(
        net,
        found,
        source,
        field=field,
        is_cut="num_hidden_layers" in model.override_config,
        made=frozenset({_HEAD}) if is_headless else frozenset(),
    )
    if is_headless and new_head is not None:
        _draw_head(net, new_head)
    return net


def _refuse_classes(config: Any, source: str, *, is_new: bool) -> None:
    """A classifier of several labels gives no one score."""
    given: list[str] = config.architectures or []
    is_classifier = any(name.endswith("ForSequenceClassification") for name in given)
    if is_classifier and config.num_labels != 1:
        why = f"it tells {config.num_labels} classes apart, and a reward is one number"
        raise UserError("", source, why, _GIVE)
    if not is_classifier and not is_new:
        why = f"it is no reward model but {', '.join(given) or 'of no known kind'}"
        fix = "train one from it with trainer.stage=reward_model, or " + _GIVE
        raise UserError("", source, why, fix)


def _refuse_odd_heads(net: PreTrainedModel, source: str) -> None:
    """Encoders and heads of several layers have another arithmetic than ours."""
    head = dict(net.named_children()).get("score")
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or head.bias is not None:
        why = "its head is not one linear layer `score` over the last token of a decoder"
        raise UserError("", source, why, _GIVE)


@torch.no_grad()
def _draw_head(net: PreTrainedModel, seed: int) -> None:
    """Small numbers: the body learns from the first step on, and no answer is preferred by luck."""
    weight: Any = net.get_parameter(_HEAD)
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(drawn * (0.1 / weight.shape[1] ** 0.5))
