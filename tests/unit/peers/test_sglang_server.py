"""The SGLang peer speaks the protocol, and its numbers are the model's."""

import base64
import io
import math
import pickle
import threading
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.driver import EngineDriver
from tests.peers.http import Fault, JsonServer
from tests.peers.processes import PeerProcess, call
from tests.peers.tiny import driver_of, log_softmax, save_net, server_policy, sglang

POLICY = server_policy()
PROMPT = [5, 9, 33, 7]


@pytest.fixture
def driver() -> EngineDriver:
    return driver_of(server_policy(), eos_ids=frozenset({2}))


@pytest.fixture
def server(driver: EngineDriver) -> Iterator[JsonServer]:
    with sglang(driver, is_deterministic=True, has_memory_saver=True) as found:
        yield found


def post(server: JsonServer, path: str, **body: Any) -> Any:
    status, found = call(f"{server.url}{path}", body)
    assert status == 200, found
    return found


def generate(server: JsonServer, ids: Any = PROMPT, *, rid: Any = None, **parameters: Any) -> Any:
    return post(
        server,
        "/generate",
        input_ids=ids,
        return_logprob=True,
        sampling_params=parameters,
        **({} if rid is None else {"rid": rid}),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_are_of_the_scaled_softmax(server: JsonServer, temperature: float):
    reply = generate(server, temperature=temperature, max_new_tokens=9, ignore_eos=True, top_p=0.9)
    tokens = reply["output_ids"]
    expected = log_softmax(POLICY, PROMPT + tokens, temperature or 1.0)[len(PROMPT) - 1 : -1]
    scores = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in scores] == tokens
    assert [text for *_, text in scores] == [None] * 9
    wanted = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.tensor([logp for logp, *_ in scores]).sub(wanted).abs().max() < 1e-5


def test_barred_stop_tokens_are_outside_the_softmax(server: JsonServer):
    reply = generate(server, max_new_tokens=4, min_new_tokens=4, stop_token_ids=[3, 4])
    tokens = reply["output_ids"]
    rows = log_softmax(POLICY, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    rows[:, [2, 3, 4]] = -torch.inf
    wanted = rows.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    scores = reply["meta_info"]["output_token_logprobs"]
    assert torch.tensor([logp for logp, *_ in scores]).sub(wanted).abs().max() < 1e-5


def test_defaults_reply_shape_and_length(server: JsonServer):
    reply = generate(server, ignore_eos=True)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == meta["completion_tokens"] == 128
    assert meta["finish_reason"] == {"type": "length", "length": 128}
    assert (meta["prompt_tokens"], meta["weight_version"]) == (4, "default")


def test_samples_and_prompts_are_a_list_prompt_major(server: JsonServer):
    both = generate(server, [PROMPT, [1, 2, 3]], n=2, max_new_tokens=3, ignore_eos=True)
    assert [reply["meta_info"]["prompt_tokens"] for reply in both] == [4, 4, 3, 3]
    one = generate(server, [PROMPT], max_new_tokens=3)
    assert isinstance(one, list)
    assert len(one) == 1


def test_stops_are_dicts_and_a_length_goes_first(server: JsonServer):
    whole = generate(server, max_new_tokens=12, ignore_eos=True, sampling_seed=3)
    stop = whole["output_ids"][5]
    first = whole["output_ids"].index(stop)
    fixed = {"sampling_seed": 3, "stop_token_ids": [stop]}
    reply = generate(server, max_new_tokens=12, **fixed)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == whole["output_ids"][: first + 1]
    cut = generate(server, max_new_tokens=first + 1, **fixed)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": first + 1}
    ignored = generate(server, max_new_tokens=12, ignore_eos=True, **fixed)
    assert ignored["output_ids"] == whole["output_ids"]
    text = whole["text"][6:8]
    halted = generate(server, max_new_tokens=12, ignore_eos=True, sampling_seed=3, stop=[text])
    assert halted["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}
    assert text not in halted["text"]
    assert len(halted["output_ids"]) == whole["text"].index(text) + 2


def test_seeds_repeat_in_deterministic_mode_alone(server: JsonServer):
    again = [generate(server, max_new_tokens=20, sampling_seed=9)["output_ids"] for _ in range(2)]
    assert again[0] == again[1]
    with sglang(driver_of(POLICY)) as free:
        found = {
            tuple(generate(free, sampling_seed=9, max_new_tokens=20)["output_ids"])
            for _ in range(3)
        }
    assert len(found) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"sampling_params": {}}),
        ("/generate", {"input_ids": []}),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 3}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_k": 0}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1}}),
        ("/generate", {"input_ids": [999], "sampling_params": {}}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/pause_generation", {"mode": "later"}),
        ("/weights_checker", {"action": "dance"}),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(server: JsonServer, path: str, body: Any):
    assert call(f"{server.url}{path}", body)[0] == 400


def test_a_folder_of_other_weights_is_loaded(
    server: JsonServer, driver: EngineDriver, tmp_path: Path
):
    other = server_policy(seed=1)
    save_net(other, tmp_path)
    before = post(server, "/weights_checker", action="checksum")
    post(server, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="7")
    assert post(server, "/weights_checker", action="checksum") != before
    assert call(f"{server.url}/model_info")[1]["weight_version"] == "7"
    reply = generate(server, temperature=0.0, max_new_tokens=6, ignore_eos=True)
    assert reply["meta_info"]["weight_version"] == "7"
    rows = log_softmax(other, PROMPT + reply["output_ids"])[len(PROMPT) - 1 : -1]
    assert reply["output_ids"] == rows.argmax(-1).tolist()


def test_tensors_arrive_pickled(server: JsonServer, driver: EngineDriver):
    name, parameter = next(driver.policy.model.named_parameters())
    buffer = io.BytesIO()
    pickle.dump([(name, torch.ones_like(parameter))], buffer)
    payload = [base64.b64encode(buffer.getvalue()).decode()]
    reply = post(server, "/update_weights_from_tensor", serialized_named_tensors=payload)
    assert reply["success"]
    assert bool((parameter == 1).all())


def in_background(server: JsonServer, driver: EngineDriver, **more: Any):
    """A long request, and where its reply will be."""
    replies: list[Any] = []
    work = threading.Thread(
        target=lambda: replies.append(generate(server, **more, max_new_tokens=200, ignore_eos=True))
    )
    driver.pause_s = 0.005
    work.start()
    while driver.passes < 5:
        time.sleep(0.005)
    return work, replies


def test_abort_returns_what_there_is(server: JsonServer, driver: EngineDriver):
    work, replies = in_background(server, driver, rid="abc-1")
    assert call(f"{server.url}/flush_cache", {})[0] == 400
    post(server, "/abort_request", rid="other")
    post(server, "/abort_request", rid="abc")
    work.join()
    assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(replies[0]["output_ids"]) < 200
    assert call(f"{server.url}/flush_cache", {})[0] == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_modes(server: JsonServer, driver: EngineDriver, tmp_path: Path, mode: str):
    other = server_policy(seed=1)
    save_net(other, tmp_path)
    work, replies = in_background(server, driver)
    post(server, "/pause_generation", mode=mode)
    passes = driver.passes
    body = {"model_path": str(tmp_path), "weight_version": "2"}
    status, _ = call(f"{server.url}/update_weights_from_disk", body)
    assert status == (400 if mode == "in_place" else 200)
    if mode == "in_place":
        post(server, "/update_weights_from_disk", **body, flush_cache=False)
    assert driver.passes == passes
    driver.pause_s = 0.0
    post(server, "/continue_generation")
    work.join()
    [reply] = replies
    assert reply["meta_info"]["weight_version"] == ("default" if mode == "abort" else "2")
    assert (len(reply["output_ids"]) < 200) == (mode == "abort")
    scores = torch.tensor([logp for logp, *_ in reply["meta_info"]["output_token_logprobs"]])
    if mode == "retract":
        rows = log_softmax(other, PROMPT + reply["output_ids"])[len(PROMPT) - 1 : -1]
        wanted = rows.gather(-1, torch.tensor(reply["output_ids"])[:, None])[:, 0]
        gaps = scores.double().sub(wanted).abs()
        assert gaps[0] > 1e-3
        assert gaps[-100:].max() < 1e-4


def test_memory_is_released_and_resumed(server: JsonServer):
    post(server, "/release_memory_occupation", tags=["kv_cache"])
    assert call(f"{server.url}/generate", {"input_ids": [1]})[0] == 500
    post(server, "/resume_memory_occupation")
    assert generate(server, max_new_tokens=1)["output_ids"]


FAULTS = {
    "fewer": lambda reply: reply == [],
    "tokens": lambda reply: len(reply["meta_info"]["output_token_logprobs"]) == 2,
    "nan": lambda reply: math.isnan(reply["meta_info"]["output_token_logprobs"][-1][0]),
    "null": lambda reply: reply["meta_info"]["output_token_logprobs"][-1][0] is None,
    "old_version": lambda reply: reply["meta_info"]["weight_version"] == "default",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_happen_once_and_are_over(server: JsonServer, name: Any):
    post(server, "/update_weight_version", new_version="3")
    server.faults.plan(Fault(name=name, path="/generate"))
    assert FAULTS[name](generate(server, max_new_tokens=3, ignore_eos=True))
    sound = generate(server, max_new_tokens=3, ignore_eos=True)
    assert len(sound["meta_info"]["output_token_logprobs"]) == 3
    assert sound["meta_info"]["weight_version"] == "3"


def test_faults_on_the_wire(server: JsonServer):
    server.faults.plan(Fault(name="error", path="/generate", after=1))
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    found = [call(f"{server.url}/generate", body)[0] for _ in range(3)]
    assert found == [200, 500, 200]
    server.faults.plan(Fault(name="cut", path="/model_info"))
    with pytest.raises(IncompleteRead):
        call(f"{server.url}/model_info")
    server.faults.plan(Fault(name="hang", path="/health", times=None))
    with pytest.raises(TimeoutError):
        call(f"{server.url}/health", timeout=0.2)
    server.faults.clear()
    assert call(f"{server.url}/health")[0] == 200


def test_a_process_serves_a_folder_and_dies_of_its_fault(tmp_path: Path):
    save_net(POLICY, tmp_path)
    dead = Fault(name="die", path="/generate", after=1)
    with PeerProcess("sglang_server", tmp_path, faults=[dead]) as peer:
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        status, reply = call(f"{peer.url}/generate", body)
        assert (status, len(reply["output_ids"])) == (200, 4)
        with pytest.raises(OSError, match=r"closed|reset"):
            call(f"{peer.url}/generate", body)
        assert peer.process.wait() == -9
