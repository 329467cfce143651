"""Rollouts as one packed batch, with old, reference and teacher log-probs and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Score, Source
from luyen.config.catalog import EstimatorFacts
from luyen.config.plan import (
    has_teacher,
    is_off_policy,
    is_pure_distillation,
    needs_critic,
    needs_reference,
)
from luyen.config.schema.run import RunConfig
from luyen.engine.actor import gap_metrics
from luyen.engine.batch import REPLAYED_ROUTES, ROUTES, PackedBatch, flat_tensor, pack
from luyen.models.experts import recorded_routes
from luyen.rewards.tree import turn_shares
from luyen.rollout.single_turn import Group
from luyen.runtime.roles import Roles
from luyen.telemetry.rollout_codec import IS_SAMPLED


def token_rewards(rollout: Rollout) -> list[float]:
    """Reward of each token, branches concatenated; the sum is the score."""
    rewards = [0.0] * _length(rollout)
    for place, reward in rewards_by_token(rollout).items():
        rewards[place] = reward
    return rewards


def rewards_by_token(rollout: Rollout) -> dict[int, float]:
    """Non-zero rewards by token index, branches concatenated.

    The reward of a turn is placed on the last sampled token of the turn, else on the last sampled
    token before it, else on the first sampled token; the rest of the score on the last sampled
    token. Without any sampled token everything is placed on the last token.
    """
    length, score = _length(rollout), _score_of(rollout)
    shares = list(turn_shares(score)) if score.by_turn or score.parts else []
    if (
        not shares and rollout.sources and rollout.sources[-1] is Source.SAMPLED
    ):  # most are like this
        return {length - 1: 0.0 + reward_of(rollout)}
    if not length:
        return {}
    parts = (*rollout.earlier, rollout)  # a rollout has the streams of its last branch
    sources = [source for part in parts for source in part.sources]
    sampled = [i for i, source in enumerate(sources) if source is Source.SAMPLED]
    first, last = (sampled[0], sampled[-1]) if sampled else (length - 1, length - 1)
    turns = [turn for part in parts for turn in part.turns] if shares else []
    ends = {turns[i]: i for i in sampled} if shares else {}
    rewards: dict[int, float] = {}
    for turn, share in shares:
        place = max((end for other, end in ends.items() if other <= turn), default=first)
        rewards[place] = rewards.get(place, 0.0) + share
    rest = fsum([reward_of(rollout), *(-share for _, share in shares)])
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards


def _length(rollout: Rollout) -> int:
    if not rollout.earlier:  # most are like this
        return len(rollout.sources)
    return sum(len(part.sources) for part in (*rollout.earlier, rollout))


def reward_of(rollout: Rollout) -> float:
    """The score's value; rollouts without one must have been dropped before."""
    value = _score_of(rollout).value
    assert value is not None, "a rollout reached training without a score"
    return value


def _score_of(rollout: Rollout) -> Score:
    assert rollout.score is not None, "a rollout reached training unscored"
    return rollout.score


def batch_order(groups: Sequence[Group]) -> list[Rollout]:
    """The rollouts in the order of the packed batch."""
    return sorted((r for g in groups for r in g.rollouts), key=lambda r: r.key)


def pack_groups(
    groups: Sequence[Group],
    device: torch.device | str = "cpu",
    *,
    with_rewards: bool = True,
    replays_routes: bool = False,
) -> PackedBatch:
    """Pack all rollouts, sorted by address, with the sampler's log-probs and turn numbers.

    Sorting makes the batch independent of the order in which rollouts finished. Each branch of a
    rollout is a sequence of its own; `PackedBatch.rollouts` joins them. `with_rewards` adds the
    stream of token rewards. Recorded experts are a stream, which `replays_routes` lets layers use.
    """
    rollouts = batch_order(groups)
    # A rollout has the streams of its last branch; `branches` would copy them.
    branches = [(i, part) for i, r in enumerate(rollouts) for part in (*r.earlier, r)]
    labels: dict[str, int] = {}
    masks = [bytes(branch.sources).translate(IS_SAMPLED) for _, branch in branches]
    batch = pack(
        [branch.tokens for _, branch in branches],
        masks=masks,
        groups=[labels.setdefault(str(rollouts[i].group), len(labels)) for i, _ in branches],
        device=device,
    )
    if not bool(batch.layout.mask.any()):
        raise UserError(
            "batch",
            f"{len(rollouts)} rollouts",
            "no token was sampled by the policy, so there is nothing to train on",
            "look at the rollouts of this step: are prompts cut, is max_response_length too small?",
        )
    logps = [0.0 if logp is None else logp for _, branch in branches for logp in branch.logps]
    turns = chain.from_iterable(branch.turns for _, branch in branches)
    batch = replace(batch, branch_of=tuple(i for i, _ in branches))
    batch = batch.with_streams(
        rollout_logp=flat_tensor(logps, torch.float32).to(device),
        turns=flat_tensor(turns, torch.int64).to(device),
    )
    if any(branch.routes for _, branch in branches):
        routes = recorded_routes([(branch.routes, len(branch.tokens)) for _, branch in branches])
        name = REPLAYED_ROUTES if replays_routes else ROUTES
        batch = batch.with_streams(**{name: routes.to(device)})
    if not with_rewards:
        return batch
    return batch.with_streams(rewards=_rewards(rollouts, len(batch.tokens)).to(device))


def _rewards(rollouts: Sequence[Rollout], tokens: int) -> Tensor:
    """Reward of each token; most have none."""
    places: list[int] = []
    values: list[float] = []
    start = 0
    for rollout in rollouts:
        for place, reward in rewards_by_token(rollout).items():
            places.append(start + place)
            values.append(reward)
        start += len(rollout.tokens)
        if rollout.earlier:
            start += sum(len(part.tokens) for part in rollout.earlier)
    rewards = torch.zeros(tokens)
    rewards[flat_tensor(places, torch.int64)] = flat_tensor(values, torch.float32)
    return rewards


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredSignals:
    """What a batch needs besides tokens and the sampler's log-probs, by configuration.

    Example:
        >>> RequiredSignals(old_logp="skip", reference=False, values=False, sum_pi_squared=False,
        ...       baselines=False, components=False).old_logp
        'skip'
    """

    old_logp: str
    """`compute`: a forward pass; `rollout`: the sampler's (bypass mode); `skip`: the only optimizer
    step uses the same weights, so its own forward pass yields them."""
    reference: bool
    """Log-probabilities of the reference policy."""
    values: bool
    """Values of the critic."""
    sum_pi_squared: bool
    """Σπ² of each token."""
    baselines: bool
    """Rewards of greedy rollouts (ReMax)."""
    components: bool
    """Parts of the reward (GDPO)."""
    teacher: bool = False
    """Log-probabilities of the teacher."""
    reward: bool = True
    """Scores of rollouts; False for pure distillation, where rollouts are not scored."""
    replays_routes: bool = False
    """Whether layers of a mixture take the experts that the sampler chose."""


def required_signals(config: RunConfig, estimator: EstimatorFacts) -> RequiredSignals:
    """The signals that a configuration requires."""
    has_reward = not is_pure_distillation(config)
    required = estimator.needs if has_reward else ()
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        old = "rollout"
    elif (
        is_off_policy(config)
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or config.algorithm.use_kl_in_reward
        or not {"sum_pi_squared", "old_logp"}.isdisjoint(required)
        or config.distill.on_policy
    ):
        old = "compute"
    else:
        old = "skip"
    return RequiredSignals(
        old_logp=old,
        reference=needs_reference(config),
        values=needs_critic(config, estimator),
        sum_pi_squared="sum_pi_squared" in required,
        baselines="baselines" in required,
        components="components" in required,
        teacher=has_teacher(config),
        reward=has_reward,
        replays_routes=config.actor_rollout_ref.actor.router_replay.mode == "R3",
    )


def compute_logprobs(batch: PackedBatch, roles: Roles, needs: RequiredSignals) -> PackedBatch:
    """Add old, reference and teacher log-probs and values as `needs` says, before the update."""
    streams = dict(batch.streams)
    if needs.old_logp == "compute" or needs.sum_pi_squared:
        scored = roles.old_scores(batch, sum_pi_squared=needs.sum_pi_squared)
        streams["old_logp"] = scored["logp"]
        if needs.sum_pi_squared:
            streams["sum_pi_squared"] = scored["sum_pi_squared"]
    if needs.old_logp == "rollout":
        streams["old_logp"] = streams["rollout_logp"]
    if needs.reference:
        streams["ref_logp"] = roles.reference_logp(batch)
    if needs.teacher:
        streams["teacher_logp"] = roles.teacher_logp(batch)
    if needs.values:
        streams["values"] = roles.values(batch)
    if needs.old_logp == "skip":
        # The update may shuffle; `place` restores the batch order of its log-probs.
        streams["place"] = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return batch.with_streams(**streams)


def parity_metrics(batch: PackedBatch, needs: RequiredSignals) -> dict[str, float]:
    """Gap between trainer and sampler log-probs, where old log-probs had a pass of their own.

    With `skip` the update measures the gap in its forward pass. In bypass mode the sampler's
    log-probs are used as the trainer's, so there is no gap to report.
    """
    if needs.old_logp != "compute":
        return {}
    return gap_metrics(batch, batch.streams["old_logp"])
