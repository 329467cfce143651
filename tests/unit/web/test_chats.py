"""Chats of the studio: streamed answers of one or two checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.base.rundir import RunDirectory
from tests.unit.web.server import Client, serving, until
from tests.unit.web.test_jobs import SHORT, key, settled, start

_ = key  # the fixture: a key of the test's own


def events(client: Client, chat_id: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    reply = client.post(f"/chats/{chat_id}/messages", body)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    found: list[tuple[str, dict[str, Any]]] = []
    for block in reply.body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_two_checkpoints_answer_side_by_side(tmp_path: Path):
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root) as client:
        assert settled(client, start(client, SHORT, "talker"))["state"] == "finished"
        found = until(lambda: client.get("/chats/sources"))
        assert [one["kind"] for one in found] == ["checkpoint"]
        chat_id = client.post("/chats", {"sources": [found[0], found[0]]}).json["id"]
        said = events(client, chat_id, message="12+34=", temperature=0, max_tokens=3)
        texts = ["".join(one["text"] for name, one in said if name == "token" and one["side"] == i)
                 for i in (0, 1)]  # fmt: skip
        assert texts[0] == texts[1] != ""
        ends = [one for name, one in said if name == "done"]
        assert sorted(one["side"] for one in ends) == [0, 1]
        assert all(1 <= one["tokens"] <= 3 for one in ends)
        assert events(client, chat_id, message="1+1=", max_tokens=2)[-1][0] == "done"
        assert client.post(f"/chats/{chat_id}/close", {}).status == 200
        assert client.post(f"/chats/{chat_id}/messages", {"message": "a"}).status == 404
        with_tools = client.post("/chats", {"sources": [{**found[0], "tools": True}]})
        assert with_tools.status == 422
        assert with_tools.json["error"]["field"] == "tools"
        assert_a_served_model_says_the_same(client, found[0], texts[0])


def assert_a_served_model_says_the_same(client: Client, source: dict[str, Any], text: str):
    """A server that the studio starts, takes no place of the queue and is talked to by its URL."""
    job = client.post("/servers", {"run_id": source["run_id"], "step": source["step"]}).json
    assert job["is_server"]
    assert job["command"].startswith("luyen serve ")
    is_served = lambda: next((one for one in client.get("/jobs")["jobs"] if one["url"]), None)  # noqa: E731
    url = until(is_served, seconds=120)["url"]
    assert url.startswith("http://127.0.0.1:")
    server = client.get("/chats/sources")[0]
    assert (server["kind"], server["url"]) == ("url", url)
    chat_id = client.post("/chats", {"sources": [server]}).json["id"]
    said = events(client, chat_id, message="12+34=", temperature=0, max_tokens=3)
    assert "".join(one["text"] for name, one in said if name == "token") == text
    assert said[-1][0] == "done"
    assert 1 <= said[-1][1]["tokens"] <= 3
    assert settled(client, start(client, SHORT, "beside"))["state"] == "finished"
    assert client.post(f"/jobs/{job['id']}/stop", {}).status == 200
    assert settled(client, job["id"])["state"] == "stopped"
    gone = client.post("/chats", {"sources": [{"url": url}]}).json["id"]
    assert events(client, gone, message="1")[-1][0] == "error"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"sources": []}, 422),
        ({"sources": [{"run_id": "a-00000000", "step": 1}]}, 404),
        ({"sources": [{"run_id": "../../etc", "step": 1}]}, 404),
        ({"sources": [{"run_id": "RUN", "step": 7}]}, 404),
        ({"sources": [{"run_id": "RUN", "step": 1}]}, 422),
        ({"sources": [{"url": "http://127.0.0.1:1/v1", "api_key_env": "A B"}]}, 422),
        ({"sources": [{"url": ""}]}, 422),
    ],
)
def test_a_chat_is_with_a_checkpoint_of_the_folder_that_may_be_trusted(
    tmp_path: Path, body: dict[str, Any], status: int
):
    text = "trainer: {stage: rl, total_training_steps: 3, plugins: [evil.py]}\n"
    run = RunDirectory.create(tmp_path / "p" / "a", config=text, provenance={}, manifest={})
    (run.root / "checkpoints" / "step_000001").mkdir(parents=True)
    with serving(tmp_path) as client:
        named = json.loads(json.dumps(body).replace("RUN", client.only_run()))
        assert client.post("/chats", named).status == status
    with serving(tmp_path, is_read_only=True) as client:
        assert client.post("/chats", named).status in (404, 405)
