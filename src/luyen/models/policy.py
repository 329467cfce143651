"""Policy and critic: packed tokens in, log-probabilities or values out."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luyen.base.errors import UserError
from luyen.models.attention import AttentionContext, use_our_attention
from luyen.models.batch_invariant import batch_invariant_modules, gather_rows
from luyen.models.batch_invariant_linear import batch_invariant_few_rows, choose_products
from luyen.models.experts import (
    ROUTING,
    RoutingLog,
    batch_invariant_experts,
    choose_experts,
    routed_layers,
)
from luyen.models.fused.patch import FusedReport, fuse_layers
from luyen.models.head import Head, TokenScores, likeliest_targets, score
from luyen.models.hf_loading import no_warnings
from luyen.models.offload import offload_activations
from luyen.models.packed_attention import (
    PackedContext,
    Sharing,
    VarlenContext,
    packed_positions,
    share_prompts,
)
from luyen.models.padded_forward import (
    read_states,
    refuse_what_cannot_be_packed,
    refuse_what_cannot_be_read,
    unpacked_hidden,
)
from luyen.models.rank_splits import OwnPlaces, Read, SequenceSplit, VocabularySplit, score_split

Used = TypeVar("Used")

# The decoder layers over packed sequences, which policies and reward models share.


def prepare_layers(model: PreTrainedModel, device: torch.device) -> FusedReport | None:
    """Give a model our attention and, on this kind of device, layers that are exact or fused."""
    with no_warnings():
        use_our_attention(model)
    batch_invariant_experts(model)
    if device.type == "cuda":
        return fuse_layers(model)
    batch_invariant_modules(model)
    batch_invariant_few_rows(model)
    return None


def hidden_at(
    read: Read,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor,
    where: Tensor,
    *,
    is_exact: bool,
    is_shared: bool = True,
    routing: RoutingLog | None = None,
) -> Tensor:
    """Last hidden states at the packed positions `where`.

    With `is_shared`, what several sequences begin with, up to their first True in `mask`, is
    computed once; `where` may point anywhere. `routing` is the log that `read` writes.
    """
    part = _Pass.of(tokens, lengths, mask, where, is_exact=is_exact, is_shared=is_shared)
    if routing is not None and part.sharing is not None:
        routing.count_rows(part.sharing.multiplicity(), part.sharing.first)
    return part.take(read(part.tokens, part.positions, part.context), part.places)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """What a pass over packed sequences computes.

    Example:
        Two sequences that begin with the prompt 7, 8, at whose end each is continued.

        >>> tokens, mask = torch.tensor([7, 8, 1, 7, 8, 2]), torch.tensor([0, 0, 1, 0, 0, 1]).bool()
        >>> where = torch.tensor([1, 4])
        >>> _Pass.of(tokens, (3, 3), mask, where, is_exact=True, is_shared=True).places.tolist()
        [1, 1]
    """

    tokens: Tensor
    """Tokens, shared ones once."""
    positions: Tensor
    """Where each stands in its sequence."""
    context: AttentionContext
    """Which tokens see each other."""
    places: Tensor
    """Which of the tokens' hidden states are wanted."""
    sharing: Sharing | None
    """Tokens that several sequences share; None: none."""

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        where: Tensor,
        *,
        is_exact: bool,
        is_shared: bool,
    ) -> "_Pass":
        """The arguments are those of `hidden_at`."""
        positions = packed_positions(lengths, tokens.device)
        sharing = share_prompts(tokens, lengths, mask) if is_shared else None
        if sharing is not None and sharing.saved == 0:
            sharing = None
        return cls(
            tokens=tokens if sharing is None else tokens[sharing.first],
            positions=positions if sharing is None else positions[sharing.first],
            context=_context(lengths, tokens.device, sharing, is_exact=is_exact),
            places=where if sharing is None else sharing.place[where],
            sharing=sharing,
        )

    def take(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Rows of hidden states."""
        return (
            gather_rows(hidden, rows) if self.sharing is not None else hidden.index_select(0, rows)
        )


def _context(
    lengths: Sequence[int], device: torch.device, sharing: Sharing | None, *, is_exact: bool
) -> AttentionContext:
    """Attention for packed sequences on this kind of device."""
    if device.type == "cuda":
        return VarlenContext.of(lengths, device=device, is_exact=is_exact, sharing=sharing)
    return PackedContext.of(lengths, device=device, sharing=sharing)


@final
class Policy(nn.Module):
    """One model, shared by training and generation: the same modules, the same kernels."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary: int,
        is_packed: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """`vocabulary` is the number of ids the tokenizer knows.

        `device` is where passes will run, if the weights are moved there later, in parts; None: the
        weights are there.

        A model that cannot be packed is refused, unless `is_packed` is False: then it keeps its own
        attention, learns from padded sequences, and generates through the `hf` engine.
        """
        super().__init__()
        self.model = model
        self.is_packed = is_packed
        self._device = device
        self.is_offloading = False
        """Whether activations wait for the backward pass in host memory."""
        self.sequence_split: SequenceSplit | None = None
        """Divides passes over ranks; None: this process computes all tokens of its passes."""
        self.reader: (
            Callable[[Tensor, Tensor, AttentionContext, RoutingLog | None], Tensor] | None
        ) = None
        """Computes what `hidden` returns; None: the layers of the model do."""
        self.vocabulary_split: VocabularySplit | None = None
        """Divides the output layer over ranks; None: this process has all of it."""
        self.least: Callable[[int], int] = int
        """The smallest of a number over the ranks that have parts of this model."""
        self.head = _head_of(model, vocabulary)
        if is_packed:
            _refuse_adapted_head(self.head.linear, self.device)
            self.fused = prepare_layers(model, self.device)
        # Weights that wait elsewhere are checked there, with the products of that place; what lays
        # them out on `device` sets this again.
        self._is_exact = True
        if device is None:
            self.is_exact = True
        self._is_routed = is_packed and bool(routed_layers(model))
        if is_packed:
            refuse_what_cannot_be_packed(model, self.head)
        else:
            refuse_what_cannot_be_read(model, self.head)

    @property
    def is_exact(self) -> bool:
        """On a GPU: whether log-probabilities must be those of the sampler, to the bit."""
        return self._is_exact

    @is_exact.setter
    def is_exact(self, value: bool) -> None:
        self._is_exact = value
        if self.is_packed and self.device.type == "cuda":
            choose_products(self.model, is_exact=value, device=self._device)
            choose_experts(self.model, is_exact=value)

    @property
    def is_routed(self) -> bool:
        """Whether layers send tokens to experts, and write a log of whole passes."""
        return self._is_routed and self.sequence_split is None

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._device or next(self.parameters()).device

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: AttentionContext,
        routing: RoutingLog | None = None,
    ) -> Tensor:
        """Last hidden state `[tok, hidden]` of packed tokens; routed layers write the log."""
        assert self.is_packed, "the model was loaded with its own attention"
        if self.reader is not None:
            return self.reader(tokens, positions, context, routing)
        base: Any = self.model.base_model
        given = {} if routing is None else {ROUTING: routing}
        with offload_activations(self.model) if self.is_offloading else nullcontext():
            out = base(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                luyen_context=context,
                **given,
            )
        return out.last_hidden_state[0]

    def packed_hidden(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        where: Tensor,
        *,
        is_shared: bool = True,
        routing: RoutingLog | None = None,
    ) -> Tensor:
        """Last hidden states at the packed positions `where`."""
        if not self.is_packed:
            return unpacked_hidden(self._padded_hidden, tokens, lengths, where)
        return hidden_at(
            self.hidden if routing is None else partial(self.hidden, routing=routing),
            tokens,
            lengths,
            mask,
            where,
            is_exact=self.is_exact,
            is_shared=is_shared,
            routing=routing,
        )

    def from_hidden(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        where: Tensor,
        use: Callable[[Tensor], Used],
    ) -> Used:
        """What `use` makes of the last hidden states at `where`; it may read the head.

        A sharded model is gathered as for `forward`, and its head stays gathered afterwards.
        """
        return use(self.packed_hidden(tokens, lengths, mask, where))

    def own_hidden(
        self,
        split: SequenceSplit,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        where: Tensor,
        *,
        is_shared: bool = True,
    ) -> tuple[Tensor, OwnPlaces]:
        """Last hidden states at this rank's places of `where`, and which these are."""
        part = _Pass.of(tokens, lengths, mask, where, is_exact=self.is_exact, is_shared=is_shared)
        own = split.own_places(part.places, part.tokens.numel())
        hidden = split.read(self.hidden, part.tokens, part.positions, part.context)
        return part.take(hidden, own.rows), own

    def _padded_hidden(self, tokens: Tensor) -> Tensor:
        """Padding needs no mask here, of which transformers would warn."""
        with (
            no_warnings(),
            offload_activations(self.model) if self.is_offloading else nullcontext(),
        ):
            return read_states(self.model, tokens, use_cache=False)

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        entropy_gradient: bool = True,
        sum_pi_squared: bool = False,
        likeliest: bool = False,
        is_shared: bool = True,
        routing: RoutingLog | None = None,
    ) -> TokenScores:
        """Scores of the tokens where `mask` is True, in order, each given those before it.

        The first token of a sequence has nothing before it and must not be in the mask. With
        `is_shared`, a prompt that several sequences begin with is computed once. `routing` is
        written where `is_routed`.
        """
        where = mask.nonzero()[:, 0]
        split, own = self.sequence_split, None
        if split is None:
            hidden = self.packed_hidden(
                tokens, lengths, mask, where - 1, is_shared=is_shared, routing=routing
            )
        else:
            hidden, own = self.own_hidden(
                split, tokens, lengths, mask, where - 1, is_shared=is_shared
            )
        targets = tokens.index_select(0, where if own is None else where[own.index])
        scored = self._score(
            hidden,
            targets,
            likeliest=likeliest,
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            sum_pi_squared=sum_pi_squared,
        )
        if split is None or own is None:
            return scored
        return scored.map(partial(split.join, own=own, count=where.numel()))

    def _score(
        self, hidden: Tensor, targets: Tensor, *, likeliest: bool, **wanted: Any
    ) -> TokenScores:
        """Scores of targets given their hidden states, of all ranks' rows of the output layer."""
        if self.vocabulary_split is not None:
            return score_split(
                self.head, self.vocabulary_split, hidden, targets, likeliest=likeliest, **wanted
            )
        scored = score(self.head, hidden, targets, **wanted)
        if likeliest:
            found = likeliest_targets(self.head, hidden.detach(), targets)
            scored = replace(scored, is_likeliest=found)
        return scored


def _head_of(model: PreTrainedModel, vocabulary: int) -> Head:
    """The output layer, and what the model does to its logits."""
    config: Any = model.config.get_text_config()
    given: dict[str, Any] = config.to_dict()
    output: Any = model.get_output_embeddings()
    if output is None:
        why, fix = "it has no output layer that we know", "give a causal language model"
        raise UserError("actor_rollout_ref.model.path", type(model).__name__, why, fix)
    return Head(
        linear=output,
        vocabulary=min(vocabulary, config.vocab_size),
        softcap=given.get("final_logit_softcapping"),
        scale=float(given.get("logit_scale") or 1.0) / float(given.get("logits_scaling") or 1.0),
    )


def _refuse_adapted_head(output: Any, device: torch.device) -> None:
    """On a GPU the sampling and scoring kernels read one weight; an adapter adds two more."""
    if device.type == "cuda" and not isinstance(output, nn.Linear):
        raise UserError(
            "actor_rollout_ref.model.target_modules",
            type(output).__name__,
            "the output layer has an adapter, and scores on a GPU are made from one weight",
            "leave lm_head out",
        )


# A critic: the same packed forward with one fp32 number per token instead of a vocabulary.


@final
class ValueModel(nn.Module):
    """Value of the state before each token: what the critic expects when that token is chosen."""

    def __init__(self, policy: Policy) -> None:
        """The body of `policy` with a head that starts at 0, so that the first values are 0."""
        super().__init__()
        config: Any = policy.model.config.get_text_config()
        self.body = policy
        if not _is_tied(policy):
            self.body.head.linear.requires_grad_(False)
        self.value = nn.Linear(config.hidden_size, 1, dtype=torch.float32, device=policy.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, tokens: Tensor, lengths: Sequence[int], mask: Tensor) -> Tensor:
        """Values before the tokens where `mask` is True, in order."""
        where = mask.nonzero()[:, 0]
        split = self.body.sequence_split
        if split is not None:
            hidden, own = self.body.own_hidden(split, tokens, lengths, mask, where - 1)
            return split.join(self.value(hidden.float())[:, 0], own, where.numel())
        hidden = self.body.packed_hidden(tokens, lengths, mask, where - 1)
        # A tensor of its own: FSDP hangs a hook on it, which a view could lose.
        return self.value(hidden.float())[:, 0].clone()


def _is_tied(policy: Policy) -> bool:
    """A tied output layer is the embedding, which the critic trains; another one it never uses."""
    embedding: Any = policy.model.get_input_embeddings()
    output: Any = policy.head.linear
    return output.weight is embedding.weight
