"""Reward models: the packed forward with one score per answer or step, loaded or newly made."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from luyen.base.boundary import library_faults
from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.attention import AttentionContext
from luyen.models.batch_invariant_linear import choose_products
from luyen.models.export import disk_errors, make_readable
from luyen.models.hf_loading import (
    config_of,
    inspect_folder,
    load_net,
    no_progress_bars,
    refuse_gaps,
    refuse_odd_numbers,
)
from luyen.models.load import detach_from_file, dtype_of, read_config, save_memory
from luyen.models.lora import adapter_layers, add_adapter, merged_weight
from luyen.models.offload import offload_activations
from luyen.models.padded_forward import refuse_what_cannot_be_packed
from luyen.models.policy import hidden_at, prepare_layers

_SCORE = "score"
"""Name of the layer that transformers makes a score with."""
STEPWISE = "luyen_judges_steps"
"""Key of config.json: whether scores are of the steps of an answer."""


@final
class ScoreHead(nn.Linear):
    """What makes a score of a hidden state: a linear layer with one output, summed in float64.

    Example:
        >>> head = ScoreHead(nn.Linear(2, 1, bias=False))
        >>> head(torch.zeros(3, 2)).tolist()
        [0.0, 0.0, 0.0]
    """

    def __init__(self, linear: nn.Linear) -> None:
        """It has the weight of `linear`."""
        super().__init__(linear.in_features, 1, bias=False, device="meta")
        self.weight = linear.weight
        if self.weight.dtype != torch.float64:
            # A score is one sum: rounding its weights would be most of its error.
            self.float()

    def forward(self, input: Tensor) -> Tensor:
        """The score of each row of hidden states."""
        weight = self.weight[0]
        # In float64 the order of the sum, which depends on the number of rows, does not show.
        return (input.double() * weight.double()).sum(-1).to(weight.dtype)


@final
class RewardModel(nn.Module):
    """A score for a sequence at its last token, or for a step at the token that ends it.

    The weights are those of transformers' `AutoModelForSequenceClassification` with one label.
    A score does not depend on what else is read at the same time, as far as the layers do not.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        """`net` has a body and a linear layer `score` with one output and no bias."""
        super().__init__()
        self.net = net
        self.is_offloading = False
        """Whether activations wait for the backward pass in host memory."""
        linear = net.get_submodule(_SCORE)
        assert isinstance(linear, nn.Linear)
        net.set_submodule(_SCORE, ScoreHead(linear))
        self.fused = prepare_layers(net, self.device)
        self.is_exact = True
        refuse_what_cannot_be_packed(net, None)

    @property
    def is_exact(self) -> bool:
        """On a GPU: whether a score has the same bits in a batch of any size."""
        return self._is_exact

    @is_exact.setter
    def is_exact(self, value: bool) -> None:
        self._is_exact = value
        if self.device.type == "cuda":
            choose_products(self.net, is_exact=value)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def head(self) -> ScoreHead:
        """What makes a score of a hidden state."""
        found = self.net.get_submodule(_SCORE)
        assert isinstance(found, ScoreHead)
        return found

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden state `[tok, hidden]` of packed tokens."""
        base: Any = self.net.base_model
        with offload_activations(self.net) if self.is_offloading else nullcontext():
            out = base(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                luyen_context=context,
            )
        return out.last_hidden_state[0]

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        judged: Tensor | None = None,
    ) -> Tensor:
        """Scores at the tokens where `judged` is True, in order; None: where `mask` is.

        A score sees its own token and those before it. `mask` says where answers are: what several
        sequences begin with before that is computed once.
        """
        where = (mask if judged is None else judged).nonzero()[:, 0]
        return self.head(
            hidden_at(self.hidden, tokens, lengths, mask, where, is_exact=self.is_exact)
        )

    def save(self, directory: Path, *, pad_token: int | None, is_stepwise: bool = False) -> None:
        """Write weights and config as transformers reads them.

        transformers takes the last token that is not `pad_token` for the end of a sequence, so it
        must be one that never ends one. Without one it reads one sequence at a time. `is_stepwise`
        notes in the config that scores are of steps, which transformers does not ask.
        """
        config: Any = self.net.config
        config.get_text_config().pad_token_id = pad_token
        setattr(config, STEPWISE, is_stepwise)
        with no_progress_bars(), disk_errors():
            self.net.save_pretrained(directory)
        make_readable(directory)


# A reward model from a directory or a hub id, or a new one over a language model.

_HEAD = f"{_SCORE}.weight"
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
    """Whether it judges steps; None where it was trained by another tool and does not say."""


def read_facts(path: str, *, field: str) -> RewardModelFacts:
    """What stands in the config; `field` is the key that named the model."""
    source = inspect_folder(ModelConfig(path=path), path, field=field, has_head=False)
    config = config_of(source, field=field)
    given: dict[str, Any] = {**config.get_text_config().to_dict(), **config.to_dict()}
    return RewardModelFacts(
        positions=given.get("max_position_embeddings"), is_stepwise=given.get(STEPWISE)
    )


def load_reward_model(
    model: ModelConfig, *, device: str, field: str, new_head: int | None = None
) -> RewardModel:
    """The reward model at `model.path`; `field` is the key that named it.

    With `new_head`, a model without a score head gets one, initialised with this seed: so small
    that all first scores are near 0. Without it such a model is refused: its scores would be noise.
    With `model.lora_rank` an adapter of the layers learns, and the head.
    """
    has_weights = model.init != "random" or new_head is None
    source = inspect_folder(model, model.path, field=field, has_weights=has_weights, has_head=False)
    try:
        net = _load(model, source, dtype_of(model, device), new_head, field)
        torch.nn.Module.to(net, torch.device(device))
        detach_from_file(net)
        refuse_odd_numbers(net, source, field=field)
    except UserError as error:
        raise UserError(field, error.value, error.why, error.fix) from error
    if model.lora_rank > 0:
        add_adapter(net, model, seed=new_head or 0, task="SEQ_CLS")
        net.get_submodule(_SCORE).requires_grad_(True)
    try:
        made = RewardModel(net)
    except UserError as error:
        raise UserError(field, error.value, error.why, error.fix) from error
    save_memory(net, model)
    made.is_offloading = model.enable_activation_offload
    return made.eval()


def _load(
    model: ModelConfig, source: str, dtype: torch.dtype, new_head: int | None, field: str
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
        _init_head(fresh, new_head)
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
        _init_head(net, new_head)
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
    head = dict(net.named_children()).get(_SCORE)
    if not isinstance(head, torch.nn.Linear) or head.out_features != 1 or head.bias is not None:
        why = "its head is not one linear layer `score` over the last token of a decoder"
        raise UserError("", source, why, _GIVE)


@torch.no_grad()
def merge_adapter(model: RewardModel, into: RewardModel) -> None:
    """Give `into`, the same model without an adapter, the weights of `model` with its adapter."""
    for name, layer in adapter_layers(model.net).items():
        target: Any = into.net.get_submodule(name)
        target.weight.copy_(merged_weight(layer, target.weight))
    into.head.weight.copy_(model.head.weight)


@torch.no_grad()
def _init_head(net: PreTrainedModel, seed: int) -> None:
    """Small numbers: the body learns from the first step on, and no answer is preferred by luck."""
    weight: Any = net.get_parameter(_HEAD)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(noise * (0.1 / weight.shape[1] ** 0.5))
