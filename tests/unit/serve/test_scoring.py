"""Reward models under /v1/score: of a run and of an exported folder, whole answers and steps."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.serve.access import Keyring
from luyen.serve.dispatch import ServeLimits
from luyen.serve.scoring import ScoreService, is_reward_model, open_reward_model
from luyen.serve.server import Access
from tests.e2e.reward_models import taught
from tests.serving import Running, serving
from tests.tiny_models import read_judge_net

LIMITS = ServeLimits(max_queue=8)
QUESTION = {"role": "user", "content": "31+20="}


def said(answer: str) -> list[dict[str, str]]:
    return [QUESTION, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judge")
    taught(place, "arithmetic://sum?pairs=even", steps=2)
    return place


def scorer(path: Path | str, **more: Any) -> ScoreService:
    model = open_reward_model(
        str(path), name="judge", overrides=("trainer.device=cpu",), is_trusted=False, **more
    )
    return ScoreService(model, LIMITS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    service = scorer(folder / "luyen" / "run")
    access = Access(host="127.0.0.1", port=0, keys=Keyring())
    with serving(service, access) as port:
        yield Running(port=port, service=service, engine=None)  # type: ignore[arg-type]


def test_scores_are_those_of_transformers(server: Running, folder: Path):
    answers = ["51", "44", "7"]
    both = server.post("/v1/score", {"conversations": [said(answer) for answer in answers]})
    assert both.status == 200, both.raw
    scores = [entry["score"] for entry in both.body["data"]]
    net = read_judge_net(folder / "exported")
    tokenizer = server.service.model.renderer.tokenizer
    text = "<|im_start|>user\n31+20=<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    for answer, score in zip(answers, scores, strict=True):
        with torch.no_grad():
            wanted = float(net(torch.tensor([tokenizer.encode(text.format(answer))])).logits[0, 0])
        assert score == pytest.approx(wanted, abs=1e-4)
    assert both.body["usage"]["total_tokens"] > 0
    assert both.body["system_fingerprint"].startswith("fp_")


def test_the_three_forms_say_the_same(server: Running):
    one = server.post("/v1/score", {"model": "judge", "messages": said("51")}).body["data"]
    two = server.post("/v1/score", {"text_1": "31+20=", "text_2": ["7", "51"]}).body["data"]
    three = server.post("/v1/score", {"conversations": [said("51")]}).body["data"]
    assert one[0]["score"] == two[1]["score"] == three[0]["score"]
    assert [entry["index"] for entry in two] == [0, 1]


def test_a_run_and_its_export_give_one_digest(server: Running, folder: Path):
    exported = scorer(folder / "exported")
    assert exported.model.digest == server.service.model.digest
    assert is_reward_model(str(folder / "exported"), is_trusted=False)
    assert not is_reward_model("builtin://arithmetic", is_trusted=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [QUESTION]}, "messages[0].role"),
        ({"messages": said("1")[1:]}, "messages[0].role"),
        ({"messages": said("1"), "conversations": [said("1")]}, "conversations"),
        ({"text_1": "a"}, "text_1"),
        ({"text_2": "a"}, "messages"),
        ({"conversations": []}, "conversations"),
        ({"conversations": [said("1"), [QUESTION]]}, "conversations[1][0].role"),
        ({"messages": said("1" * 600)}, "messages"),
        ({"messages": said("1"), "nix": 1}, "nix"),
        ({"messages": said("1"), "model": 7}, "model"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(server: Running, body: Any, param: str):
    reply = server.post("/v1/score", body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.raw


def test_limits_and_other_endpoints(server: Running):
    for body, field in (
        ({"conversations": [said("1")] * 9}, "conversations"),
        ({"text_1": "1", "text_2": ["1"] * 9}, "text_2"),
    ):
        never = server.post("/v1/score", body)
        assert (never.status, never.error["param"]) == (400, field)
        assert "retry-after" not in never.headers
    assert server.post("/v1/score", {"conversations": [said("1")] * 8}).status == 200
    other = server.chat()
    assert (other.status, other.error["code"]) == (404, "wrong_model_kind")
    assert server.get("/v1/models").body["data"][0]["id"] == "judge"
    assert server.get("/health").status == 200
    assert server.post("/v1/score", {"messages": said("1"), "model": "nix"}).status == 404


def test_a_process_reward_model_scores_every_line(tmp_path: Path):
    rows = "arithmetic://sum?steps=1&noise=0.5"
    path, _ = taught(tmp_path, rows, "reward_training.objective=process", steps=1)
    service = scorer(path)
    assert service.model.is_stepwise
    with serving(service, Access(host="127.0.0.1", port=0)) as port:
        server = Running(port=port, service=service, engine=None)  # type: ignore[arg-type]
        [entry] = server.post("/v1/score", {"messages": said("1+1=2\n\n2+2=4")}).body["data"]
    assert len(entry["steps"]) == 2
    assert entry["score"] == min(entry["steps"])


def test_a_full_queue_of_conversations_says_when_to_come_back(server: Running):
    held = threading.Event()
    service: Any = server.service
    block = service._thread.submit(held.wait)
    try:
        with ThreadPoolExecutor(1) as waiting:
            first = waiting.submit(server.post, "/v1/score", {"conversations": [said("1")] * 6})
            while service._open < 6:
                time.sleep(0.01)
            full = server.post("/v1/score", {"conversations": [said("1")] * 3})
            assert (full.status, full.error["code"]) == (429, "queue_full")
            assert full.headers["retry-after"] == "1"
            held.set()
            assert first.result().status == 200
    finally:
        held.set()
        block.result()
    assert service._open == 0
    assert server.post("/v1/score", {"conversations": [said("1")] * 3}).status == 200
