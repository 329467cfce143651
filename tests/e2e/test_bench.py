"""`luyen bench` gives figures that hang together."""

import json

import pytest

from tests.e2e.tiny import luyen

SMALL = ("--model", "builtin://arithmetic", "--device", "cpu", "--prompts", "2", "--samples", "2")
LENGTHS = ("--prompt", "4", "9", "--new", "3", "6")


@pytest.mark.parametrize("kind", ["rollout", "train", "step"])
def test_figures_come_with_their_floor(kind: str):
    done = luyen("bench", kind, *SMALL, *LENGTHS, "--json")
    assert done.exit_code == 0, done.output
    page = json.loads(done.output)
    assert page["kind"] == kind
    assert page["floor_seconds"] > 0
    assert 0 < page["fraction"] < 100
    if kind == "rollout":
        assert 12 <= page["tokens"] <= 24
        assert page["tokens_per_second"] == pytest.approx(page["tokens"] / page["seconds"])
    else:
        assert page["parity_gap"] == 0.0
        assert page["computed"] < page["tokens"]
        assert ("generate_seconds" in page) == (kind == "step")


def test_figures_are_shown_as_a_table():
    done = luyen("bench", "rollout", *SMALL, *LENGTHS)
    assert "decode tokens per second" in done.output


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = luyen("bench", "rollout", "--device", "cuda")
    assert "this machine has no CUDA device" in str(done.exception)
