"""The vLLM peer speaks the protocol, and its numbers are the model's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.driver import EngineDriver
from tests.peers.http import Fault, JsonServer
from tests.peers.processes import call
from tests.peers.tiny import driver_of, log_softmax, save_net, server_policy, vllm

POLICY = server_policy()
PROMPT = [5, 9, 33, 7]


@pytest.fixture
def driver() -> EngineDriver:
    return driver_of(server_policy(), eos_ids=frozenset({2}))


@pytest.fixture
def server(driver: EngineDriver) -> Iterator[JsonServer]:
    with vllm(driver, is_dev_mode=True, has_sleep_mode=True) as found:
        yield found


def post(server: JsonServer, path: str, **body: Any) -> Any:
    status, found = call(f"{server.url}{path}", body)
    assert status == 200, found
    return found


def complete(server: JsonServer, prompt: Any = PROMPT, **more: Any) -> list[dict[str, Any]]:
    wanted = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return post(server, "/v1/completions", prompt=prompt, **wanted, **more)["choices"]


def infer(server: JsonServer, **parameters: Any) -> list[dict[str, Any]]:
    body = {"token_ids": PROMPT, "sampling_params": {"logprobs": 0, **parameters}}
    return post(server, "/inference/v1/generate", **body)["choices"]


def scaled(tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of every token after the prompt."""
    return log_softmax(POLICY, PROMPT + tokens, temperature)[len(PROMPT) - 1 : -1]


def chosen(rows: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_log_probabilities_know_no_temperature(server: JsonServer, temperature: float):
    [choice] = complete(server, max_tokens=9, temperature=temperature, ignore_eos=True, top_p=0.6)
    tokens = choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in tokens]
    gap = torch.tensor(choice["logprobs"]["token_logprobs"]) - chosen(scaled(tokens, 1.0), tokens)
    assert gap.abs().max() < 1e-5


def test_processed_log_probabilities_are_of_what_is_left():
    with vllm(driver_of(POLICY), mode="processed_logprobs") as server:
        [choice] = infer(server, max_tokens=8, temperature=0.7, top_k=3)
    tokens = choice["token_ids"]
    rows = scaled(tokens, 0.7)
    rows[rows < rows.topk(3).values[:, -1:]] = -torch.inf
    gap = torch.tensor([c["logprob"] for c in choice["logprobs"]["content"]]) - chosen(
        rows.log_softmax(-1), tokens
    )
    assert gap.abs().max() < 1e-5


def test_defaults_and_order(server: JsonServer):
    found = complete(server, [PROMPT, [1, 2]], n=2, ignore_eos=True)
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in found] == [4, 4, 2, 2]
    assert {len(choice["token_ids"]) for choice in found} == {16}
    with vllm(driver_of(POLICY, longest=40)) as small:
        [whole] = infer(small)
    assert len(whole["token_ids"]) == 40 - len(PROMPT)


def test_seeds_count_up_over_samples(server: JsonServer):
    both = complete(server, n=2, seed=5, ignore_eos=True)
    second = complete(server, seed=6, ignore_eos=True)
    assert both[1]["token_ids"] == second[0]["token_ids"] != both[0]["token_ids"]


def test_stops(server: JsonServer):
    [whole] = complete(server, seed=5, ignore_eos=True)
    stop = whole["token_ids"][4]
    first = whole["token_ids"].index(stop)
    [done] = complete(server, seed=5, ignore_eos=True, stop_token_ids=[stop])
    assert (done["finish_reason"], done["stop_reason"]) == ("stop", stop)
    assert done["token_ids"] == whole["token_ids"][: first + 1]
    [last] = complete(server, seed=5, ignore_eos=True, stop_token_ids=[stop], max_tokens=first + 1)
    assert last["finish_reason"] == "stop"
    [text] = complete(server, seed=5, ignore_eos=True, stop=whole["text"][3:5])
    assert (text["finish_reason"], text["stop_reason"]) == ("stop", whole["text"][3:5])


def test_minus_infinity_has_a_number():
    from tests.peers.vllm_server import _clamped

    assert (_clamped(float("-inf")), _clamped(-2.0)) == (-9999.0, -2.0)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [1], "temperature": -1}, 400),
        ("/v1/completions", {"prompt": [1], "max_tokens": 4000}, 400),
        ("/v1/completions", {"prompt": [1], "model": "another"}, 404),
        ("/v1/completions", {"prompt": [999]}, 400),
        ("/inference/v1/generate", {"token_ids": [1]}, 422),
        ("/collective_rpc", {}, 400),
        ("/collective_rpc", {"method": "dance"}, 500),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/no"}}, 500),
        ("/pause?mode=later", {}, 400),
        ("/nothing", {}, 404),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: JsonServer, path: str, body: Any, status: int):
    assert call(f"{server.url}{path}", body)[0] == status


def test_control_routes_need_development_mode():
    with vllm(driver_of(POLICY)) as server:
        for path in ("/pause", "/resume", "/collective_rpc", "/abort_requests", "/sleep"):
            assert call(f"{server.url}{path}", {})[0] == 404
        assert call(f"{server.url}/health")[0] == 200


def test_a_folder_is_reloaded(server: JsonServer, tmp_path: Path):
    other = server_policy(seed=1)
    save_net(other, tmp_path)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    assert post(server, "/collective_rpc", **reload) == {"results": [None]}
    [choice] = complete(server, temperature=0.0, ignore_eos=True)
    rows = log_softmax(other, PROMPT + choice["token_ids"])[len(PROMPT) - 1 : -1]
    assert choice["token_ids"] == rows.argmax(-1).tolist()


def test_pause_sleep_and_version(server: JsonServer):
    assert post(server, "/pause?mode=keep") == {"status": "paused"}
    assert call(f"{server.url}/is_paused")[1] == {"is_paused": True}
    assert post(server, "/resume") == {"status": "resumed"}
    assert post(server, "/abort_requests") == {"status": "aborted", "aborted": 0}
    post(server, "/sleep?level=1")
    assert call(f"{server.url}/is_sleeping")[1] == {"is_sleeping": True}
    assert call(f"{server.url}/v1/completions", {"prompt": [1]})[0] == 500
    post(server, "/wake_up?tags=weights")
    post(server, "/wake_up?tags=kv_cache")
    assert len(complete(server, max_tokens=2, ignore_eos=True)) == 1
    post(server, "/update_weight_version", new_version="4")
    assert call(f"{server.url}/weight_info")[1] == {"weight_version": "4"}
    assert call(f"{server.url}/v1/models")[1]["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("name", ["fewer", "tokens", "null"])
def test_faults(server: JsonServer, name: Any):
    server.faults.plan(Fault(name=name, path="/v1/completions", times=1))
    found = complete(server, n=2, max_tokens=3, ignore_eos=True)
    if name == "fewer":
        assert len(found) == 1
    else:
        scores = found[0]["logprobs"]["token_logprobs"]
        assert len(scores) == 2 if name == "tokens" else scores[-1] is None
