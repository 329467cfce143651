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


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"sources": []}, 422),
        ({"sources": [{"run_id": "a-00000000", "step": 1}]}, 404),
        ({"sources": [{"run_id": "../../etc", "step": 1}]}, 404),
        ({"sources": [{"run_id": "RUN", "step": 7}]}, 404),
        ({"sources": [{"run_id": "RUN", "step": 1}]}, 422),
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
