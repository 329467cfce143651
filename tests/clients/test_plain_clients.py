"""The `openai` client of another environment, and curl, against `luyen serve`."""

import json
import shutil
import subprocess

import pytest

from tests.clients.conftest import FOLDER, Run
from tests.serving import Running

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def test_the_openai_client_makes_every_kind_of_call(sums: Running, caller: Running, run: Run):
    urls = (f"{sums.url}/v1", f"{caller.url}/v1")
    found = json.loads(run(FOLDER / "openai_calls.py", *urls))
    assert found["models"] == ["sums"]
    assert found["chat"] == found["stream"] == "46"
    assert found["logprobs"] == [2, 2, 2]
    assert found["n"] == 5
    assert found["completion"] == "1+2=" + found["completion_stream"]
    name, arguments = found["tool"]
    assert name == "calculator"
    assert list(arguments) == ["expression"]
    assert found["after_tool"]
    assert set(found["schema"]) == {"n"}
    assert 0 <= found["schema"]["n"] <= 99


def curl(*words: str) -> str:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "60", *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@needs_curl
def test_curl_gets_a_reply_a_stream_and_an_error(sums: Running):
    url = f"{sums.url}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
    kind = ("-H", "Content-Type: application/json")
    whole = json.loads(curl(url, *kind, "-d", json.dumps(body)))
    assert whole["choices"][0]["message"]["content"] == "46"
    lines = curl("-N", url, *kind, "-d", json.dumps({**body, "stream": True})).split("\n\n")
    assert lines[-2] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces) == "46"
    status = curl("-o", "/dev/null", "-w", "%{http_code}", url, *kind, "-d", '{"messages": 7}')
    assert status == "400"
