"""Settings of rollout correction that have a name in verl, as the keys of its config block."""

from collections.abc import Mapping
from types import MappingProxyType

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean

Knob = str | float | bool | None

_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}


def _preset(*parts: Mapping[str, Knob]) -> Mapping[str, Knob]:
    """All the keys of the parts, frozen; keys that no part names are off."""
    knobs: dict[str, Knob] = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
    for part in parts:
        knobs |= part
    return MappingProxyType(knobs)


PRESETS: Mapping[str, Mapping[str, Knob]] = MappingProxyType(
    {
        "disabled": _preset(),
        "decoupled_token_is": _preset(_TOKEN_TIS),
        "decoupled_seq_is": _preset(_SEQ_TIS),
        "decoupled_token_icepop": _preset(_ICEPOP),
        "decoupled_seq_is_rs": _preset(_SEQ_TIS, _SEQ_RS),
        "decoupled_geo_rs": _preset(_GEO_RS),
        "decoupled_geo_rs_seq_tis": _preset(_GEO_RS, _SEQ_TIS),
        "decoupled_geo_rs_token_tis": _preset(_GEO_RS, _TOKEN_TIS),
        "decoupled_k3_rs": _preset(_K3_RS),
        "decoupled_k3_rs_seq_tis": _preset(_K3_RS, _SEQ_TIS),
        "decoupled_k3_rs_token_tis": _preset(_K3_RS, _TOKEN_TIS),
        "bypass_ppo_clip": _preset(_PPO),
        "bypass_ppo_clip_geo_rs": _preset(_PPO, _GEO_RS),
        "bypass_ppo_clip_k3_rs": _preset(_PPO, _K3_RS),
        "bypass_pg_is": _preset(_PG, _SEQ_TIS),
        "bypass_pg_token_icepop": _preset(_PG, _ICEPOP),
        "bypass_pg_geo_rs": _preset(_PG, _GEO_RS),
        "bypass_pg_geo_rs_seq_tis": _preset(_PG, _GEO_RS, _SEQ_TIS),
        "bypass_pg_geo_rs_token_tis": _preset(_PG, _GEO_RS, _TOKEN_TIS),
    }
)
"""Name to keys of `algorithm.rollout_correction`."""


def correction_preset(name: str) -> Mapping[str, Knob]:
    """The keys a preset sets; a UserError with near names if there is none of this name.

    Example:
        >>> correction_preset("decoupled_token_is")["rollout_is"]
        'token'
    """
    if name not in PRESETS:
        why = "no rollout-correction preset has this name"
        raise UserError("rollout_correction", name, why, did_you_mean(name, PRESETS))
    return PRESETS[name]
