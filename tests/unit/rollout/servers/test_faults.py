"""Every fault of a server is recovered, or ends the work with its first cause."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.models.weights import Fingerprint
from luyen.rollout.protocol import generate
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.weights import GroupTransport
from tests.generation import packed_logps, pairs, request, sampled_logps
from tests.peers.driver import EngineDriver
from tests.peers.engines import served_engine
from tests.peers.http import Fault, FaultName, JsonServer
from tests.tiny_models import tiny_policy

GENERATE = {"sglang": "/generate", "vllm": "/v1/completions", "openai": "/v1/completions"}
Served = tuple[ServerEngine, JsonServer, EngineDriver]
NAMES = ("sglang", "vllm", "openai")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luyen.rollout.servers.engine._BACKOFF_S", 0.01)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def served(name: str, tmp_path: Path) -> Iterator[Served]:
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path, timeout_s=20.0) as found:
        yield found


@pytest.fixture
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine over a server that takes weights, which has version 1."""
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(request.param, policy, tmp_path, timeout_s=20.0) as found:
        found[0].send_weights(1)
        yield found


takes_weights = pytest.mark.parametrize("trained", ["sglang", "vllm"], indirect=True)


def check_sound(engine: ServerEngine) -> None:
    """Four samples that the policy would score the same."""
    asked = [request(5, 6, samples=4)]
    found = pairs(asked, generate(engine, asked))
    assert len(found) == 4
    gap = packed_logps(engine._policy, found) - sampled_logps(found)
    assert gap.abs().max() < 1e-5


def plan(server: JsonServer, fault: FaultName, path: str, **more: Any) -> None:
    server.faults.plan(Fault(name=fault, path=path, **more))


@pytest.mark.parametrize("fault", ["error", "cut", "fewer", "tokens", "nan", "null"])
def test_a_fault_of_a_request_is_asked_again(served: Served, name: str, fault: FaultName):
    engine, server, driver = served
    check_sound(engine)
    before = driver.requests
    plan(server, fault, GENERATE[name], times=2)
    check_sound(engine)
    proofs = 0 if name == "openai" else 1
    repeated = driver.requests - before - 4 - proofs
    assert repeated == (0 if fault == "error" else 2)


def test_a_server_that_hangs_is_asked_again(name: str, tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path, timeout_s=3.0) as (engine, server, _):
        check_sound(engine)
        plan(server, "hang", GENERATE[name], times=1)
        began = time.monotonic()
        check_sound(engine)
        assert time.monotonic() - began >= 3.0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("error", "http_500"),
        ("null", "log-probability is a finite number"),
        ("tokens", "log"),
        ("fewer", "samples came"),
    ],
)
def test_a_fault_that_stays_ends_the_work_with_the_first_cause(
    served: Served, name: str, fault: FaultName, cause: str
):
    engine, server, _ = served
    check_sound(engine)
    plan(server, fault, GENERATE[name], times=None)
    with pytest.raises(UserError, match="failed 4 times") as caught:
        check_sound(engine)
    assert cause in str(caught.value)
    assert "resumed" in str(caught.value)


@pytest.mark.parametrize("name", ["vllm", "openai"], indirect=True)
def test_a_refusal_is_not_repeated(served: Served):
    engine, _, driver = served
    check_sound(engine)
    driver.longest = 8  # what was allowed is now too long for the server
    with pytest.raises(UserError, match="failed 1 times") as caught:
        generate(engine, [request(6, 12)])
    assert "http_400" in str(caught.value)


@pytest.mark.parametrize("name", ["vllm", "openai"], indirect=True)
def test_a_model_of_another_name_is_noticed(served: Served, name: str):
    engine, server, _ = served
    check_sound(engine)
    plan(server, "other_model", GENERATE[name], times=1)
    check_sound(engine)
    plan(server, "other_model", GENERATE[name], times=None)
    with pytest.raises(UserError, match="another/model"):
        check_sound(engine)


@takes_weights
def test_new_weights_replace_the_old(trained: Served):
    engine, _, driver = trained
    check_sound(engine)
    with torch.no_grad():
        for parameter in engine._policy.parameters():
            parameter.mul_(1.1)
    engine.send_weights(2)
    held = engine.fingerprint()
    assert held is not None
    assert held.first_difference(Fingerprint.of(engine._policy)) is None
    check_sound(engine)
    [done] = generate(engine, [request(5, 6)]).values()
    assert done.versions == (2,) * 6
    assert driver.version == "2"


@takes_weights
def test_a_server_that_ignores_weights_answers_no_request(trained: Served):
    engine, server, driver = trained
    with torch.no_grad():
        for parameter in engine._policy.parameters():
            parameter.mul_(1.3)
    before = driver.requests
    plan(server, "deaf", "", times=None)
    with pytest.raises(UserError, match="other weights"):
        engine.send_weights(2)
    assert driver.requests - before == 4  # probes
    assert engine.fingerprint() is None


@takes_weights
def test_a_publication_that_fails_once_is_repeated(trained: Served):
    engine, server, _ = trained
    for fault in ("error", "deaf", "cut"):
        with torch.no_grad():
            for parameter in engine._policy.parameters():
                parameter.mul_(1.1)
        path = "/update_weights_from_disk" if engine.name == "sglang" else "/collective_rpc"
        plan(server, fault, path, times=1)
        engine.send_weights(2)
        check_sound(engine)


@takes_weights
def test_a_server_of_an_old_version_is_given_its_weights_again(trained: Served):
    engine, server, driver = trained
    check_sound(engine)
    driver.set_version("0")
    check_sound(engine)
    assert driver.version == "1"
    plan(server, "old_version", "", times=None)
    with pytest.raises(UserError, match="version default, not 1"):
        check_sound(engine)


@takes_weights
def test_a_server_that_forgot_its_weights_is_noticed(trained: Served):
    """As one that was started again behind our back at the same address."""
    engine, _, driver = trained
    with torch.no_grad():
        driver.policy.model.get_input_embeddings().weight.mul_(1.5)
    driver.set_version("default")
    check_sound(engine)
    assert driver.version == "1"


@takes_weights
def test_weights_that_changed_behind_the_run_with_the_version_kept_are_noticed(trained: Served):
    """No token of them is taken: the server gets its weights again, and is asked again."""
    engine, _, driver = trained
    check_sound(engine)
    with torch.no_grad():
        driver.policy.model.get_input_embeddings().weight.mul_(1.5)
    assert driver.version == "1"
    before = driver.requests
    check_sound(engine)
    assert driver.requests - before == 4 + 1 + 1 + 4 + 1  # samples, proof, publication, again
    assert driver.version == "1"


@takes_weights
def test_weights_that_change_again_and_again_end_the_work(
    trained: Served, monkeypatch: pytest.MonkeyPatch
):
    engine, _, driver = trained

    def change() -> None:
        with torch.no_grad():
            driver.policy.model.get_input_embeddings().weight.mul_(1.5)

    send = engine._send_waiting
    monkeypatch.setattr(engine, "_send_waiting", lambda: (change(), send()))
    with pytest.raises(UserError, match="it computes with other weights"):
        check_sound(engine)


def test_abort_of_a_running_request_gives_what_there_is(tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("sglang", policy, tmp_path, rows=16) as (engine, _, driver):
        check_sound(engine)
        driver.pause_s = 0.01
        asked = request(5, 300, name="long", samples=12)
        engine.submit(asked)
        start = driver.passes
        while driver.passes < start + 10:
            engine.advance()
        aborted = engine.abort("long", 1)
        assert [(d.sample, d.reason) for d in aborted] == [(1, "aborted")]
        assert 0 < len(aborted[0].tokens) < 300
        gap = packed_logps(policy, [(asked.tokens, aborted[0])]) - torch.tensor(aborted[0].logps)
        assert gap.abs().max() < 1e-5
        # No other request was stopped, although the ids of some begin with the same characters.
        assert {job.rid for job in driver._running.values()} != set()
        assert len(driver._running) == 11
        assert {d.reason for d in engine.abort("long")} == {"aborted"}
        assert engine.is_idle


def test_weights_travel_over_a_process_group(tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("sglang", policy, tmp_path, timeout_s=20.0) as (engine, _, driver):
        transport = GroupTransport(
            engine._connection, engine._dialect, workers=1, backend="gloo", timeout_s=20.0
        )
        engine._transport = transport
        for version in (1, 2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.mul_(1.05)
            engine.send_weights(version)
            check_sound(engine)
            assert driver.version == str(version)
