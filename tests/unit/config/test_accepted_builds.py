"""What passes the check is accepted where it is used: both know the same names and limits."""

import inspect
from itertools import product

import pytest
import torch

from luyen.algorithms import padded
from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.plugins import SAMPLER_ARGUMENTS
from luyen.config.tool_file import SETTINGS
from luyen.data.samplers import samplers
from luyen.rollout.tools.builtin_tools import builtin_tools

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_floor",
    "rollout_rs",
    "rollout_rs_threshold",
)
IMPORTANCE = list(
    product(
        [None, "token", "geometric"], ["2.0", "0.5_2.0", "2_0.5", "0", "x"], [None, "0.5", "3.0"]
    )
)
REJECTION = list(
    product(
        [
            "token_k1",
            "token_k2",
            "seq_max_k3",
            "token_k1,seq_mean_k3",
            "token_k9",
            "token_k2,token_k2",
        ],
        [None, "0.5", "2.0", "0.5_2.0", "0.5_2.0,0.1", "1,2,3"],
    )
)


def refused_by_check(hparams: dict[str, str | None]) -> bool:
    words = [f"algorithm.rollout_correction.{k}={v}" for k, v in hparams.items() if v is not None]
    found = check([], words, machine=LAPTOP).problems
    return any(
        p.field.startswith("algorithm.rollout_correction") for p in found if p.severity == "error"
    )


def refused_by_mathematics(hparams: dict[str, str | None]) -> bool:
    report = check(
        [],
        [f"algorithm.rollout_correction.{k}={v}" for k, v in hparams.items() if v is not None],
        machine=LAPTOP,
    )
    block = report.config.algorithm.rollout_correction
    given = {k: getattr(block, k) for k in KEYS}
    logp = torch.zeros(1, 3)
    try:
        padded.rollout_correction(logp, logp, torch.ones(1, 3), **given)
    except UserError:
        return True
    return False


@pytest.mark.parametrize(("level", "threshold", "floor"), IMPORTANCE)
def test_importance_thresholds(level: str | None, threshold: str, floor: str | None) -> None:
    hparams = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_floor": floor}
    if not refused_by_check(hparams):
        assert not refused_by_mathematics(hparams)
    else:
        assert level is None or refused_by_mathematics(hparams)


@pytest.mark.parametrize(("criteria", "threshold"), REJECTION)
def test_rejection_thresholds(criteria: str, threshold: str | None) -> None:
    hparams = {"rollout_rs": criteria, "rollout_rs_threshold": threshold}
    assert refused_by_check(hparams) == refused_by_mathematics(hparams)


def test_what_a_check_knows_of_samplers_and_tools_is_what_they_take() -> None:
    for name, hparams in SAMPLER_ARGUMENTS.items():
        parameters = inspect.signature(samplers.get(name)).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == tuple(hparams)
    for name, settings in SETTINGS.items():
        if settings is not None:
            assert set(inspect.signature(builtin_tools.get(name)).parameters) == set(settings)
