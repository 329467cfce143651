"""What a server holds after a publication: digests of its tensors, and a probe of its answers.

The probe is a short sample at a temperature other than 1. Its log-probabilities under the trainer's
weights say whether the server computes with these weights, and with which convention it reports.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key, mix
from luyen.models.policy import Policy
from luyen.rollout.protocol import Sampling
from luyen.rollout.servers.dialect import ServerFault

TEMPERATURE = 0.5
"""Of the probe: its square and 1 give other log-probabilities, which name a wrong convention."""
PROMPT_LENGTH, NEW_TOKENS = 12, 12
_TOLERANCE = {torch.float32: 2e-3}
_ROUGH = 0.15
"""Mean difference that 16-bit arithmetic may make."""
_FIELD = "actor_rollout_ref.rollout.name"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt whose continuation is scored by server and trainer.

    Example:
        >>> probe = Probe.of(vocabulary=100, room=64)
        >>> len(probe.tokens), probe == Probe.of(vocabulary=100, room=64)
        (12, True)
    """

    tokens: tuple[int, ...]
    """The prompt: tokens of the vocabulary at random, the same in every run."""
    sampling: Sampling
    """How it is continued."""
    seed: int
    """Its random seed."""

    @classmethod
    def of(cls, *, vocabulary: int, room: int) -> "Probe":
        """The probe of a vocabulary that fits into `room` tokens."""
        key = derive_key(0, "probe", vocabulary)
        prompt = max(1, min(PROMPT_LENGTH, room // 2))
        new = max(1, min(NEW_TOKENS, room - prompt))
        return cls(
            tokens=tuple(mix(key, i) % vocabulary for i in range(prompt)),
            sampling=Sampling(max_new_tokens=new, temperature=TEMPERATURE, ignore_stop=True),
            seed=key >> 2,
        )


@torch.no_grad()
def trainer_logps(
    policy: Policy, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float
) -> Tensor:
    """The trainer's log-probabilities of a continuation, in fp32 on the host."""
    whole = torch.tensor(prompt + tokens, device=policy.device)
    mask = torch.arange(len(whole), device=policy.device) >= len(prompt)
    return policy(whole, [len(whole)], mask, temperature=temperature).logp.float().cpu()


def refuse_other_answers(
    policy: Policy, probe: Probe, tokens: tuple[int, ...], logps: tuple[float, ...], *, who: str
) -> float:
    """Mean difference of the probe.

    A UserError for a wrong convention, a ServerFault for other weights.
    """
    found = torch.tensor(logps)

    def difference(temperature: float) -> float:
        ours = trainer_logps(policy, probe.tokens, tokens, temperature)
        return float((ours - found).abs().mean())

    most = _TOLERANCE.get(next(policy.parameters()).dtype, _ROUGH)
    gap = difference(TEMPERATURE)
    if gap <= most:
        return gap
    why = f"the log-probabilities of a probe differ by {gap:.3g} from the trainer's (most: {most})"
    if difference(1.0) <= most:
        why += ": it reports them before the temperature is applied"
        fix = "vllm: start it with --logprobs-mode processed_logprobs; sglang: start it without "
        raise UserError(_FIELD, who, why, f"{fix}SGLANG_RETURN_ORIGINAL_LOGPROB")
    if difference(TEMPERATURE**2) <= most:
        why += ": it applies the temperature twice"
        raise UserError(_FIELD, who, why, "drop the temperature from the server's own settings")
    raise ServerFault("weights", f"{why}: it computes with other weights")


def refuse_other_tensors(held: Mapping[str, str], sent: Mapping[str, str]) -> None:
    """A ServerFault that names the first tensor that the server does not hold as it was sent."""
    for name, digest in sent.items():
        if held.get(name) != digest:
            why = f"{name} is {held.get(name, 'missing')} there and was sent as {digest}"
            raise ServerFault("weights", why)
