"""Models measured through an endpoint: the same numbers as here, and errors that say what to do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.files import read_lines
from tests.e2e.tiny import luyen
from tests.serving import MODEL, Running, running

pytest.importorskip("fastapi")
ROWS = "arithmetic://sum?digits=2&split=held-out&size=24"
SUMS = ("--data", ROWS, "--reward", "numeric")
KEY = "a-key-of-sixteen-letters"
FEW = ("actor_rollout_ref.rollout.server.retries=1",)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def address(server: Running) -> str:
    return f"{server.url}/v1"


def told(*words: Any) -> UserError:
    done = luyen("eval", *words)
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def page(*words: Any) -> Any:
    done = luyen("eval", *words, "--json", "--show", "99")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_greedy_answers_through_an_endpoint_are_those_of_the_checkpoint(server: Running):
    here = page(MODEL, *SUMS)
    there = page("--url", address(server), *SUMS)
    assert there["metrics"] == here["metrics"]
    assert 0 < there["metrics"]["val/accuracy"] < 1
    assert there["checkpoint"] == f"{address(server)} {MODEL}"
    columns = ("uid", "answer", "reward", "stop", "tokens", "prompt", "score")
    first, second = ([{c: row[c] for c in columns} for row in p["rollouts"]] for p in (here, there))
    assert first == second


def test_a_configuration_gives_rows_reward_and_sampling(server: Running, tmp_path: Path):
    config = tmp_path / "rows.yaml"
    config.write_text(
        f"data: {{val_files: '{ROWS}', max_response_length: 1}}\n"
        "reward: {components: {numeric: {rule: numeric}}}\n"
    )
    place = tmp_path / "samples.jsonl"
    done = luyen(
        "eval", "--url", address(server), "--config", config, "--samples-out", place, "--samples=2"
    )
    assert done.exit_code == 0, done.output
    rows = read_lines(place)
    assert len(rows) == 24 * 2
    assert {row["tokens"] for row in rows} == {1}
    assert rows[0]["decoding"]["max_response_length"] == 1


def test_samples_have_seeds_so_that_an_evaluation_repeats(server: Running):
    words = ("--url", address(server), *SUMS, "--samples", "4", "--temperature", "1")
    first, second = page(*words), page(*words, "--concurrent", "3")
    assert first["rollouts"] == second["rollouts"]
    answers = [row["answer"] for row in first["rollouts"]]
    assert any(len(set(answers[i : i + 4])) > 1 for i in range(0, len(answers), 4))
    other = page(*words, "trainer.seed=5")
    assert [row["answer"] for row in other["rollouts"]] != answers


def test_an_endpoint_and_a_checkpoint_are_compared_prompt_by_prompt(server: Running):
    for words in (
        ("--url", address(server), *SUMS, "--against", MODEL),
        (MODEL, *SUMS, "--against", address(server)),
    ):
        found = page(*words)
        [difference] = found["comparison"]["differences"]
        assert difference["first"] == difference["second"] > 0
        assert {found["first"]["checkpoint"], found["second"]["checkpoint"]} == {
            MODEL,
            f"{address(server)} {MODEL}",
        }


def test_a_prompt_that_the_endpoint_refuses_is_a_fault_and_no_0(server: Running, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    pairs = [("1+" * 5000, "2"), ("12+34=", "46")]
    lines = [
        {
            "prompt": [{"role": "user", "content": ask}],
            "data_source": "sum",
            "reward_model": {"ground_truth": sum},
        }
        for ask, sum in pairs
    ]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = page("--url", address(server), "--data", rows, "--reward", "numeric")
    [summary] = found["summary"]
    assert (summary["prompts"], summary["faults"]) == (1, 1)
    assert "status 400: messages" in found["rollouts"][0]["fault"]
    assert found["rollouts"][0]["reward"] is None
    assert found["rollouts"][1]["reward"] == 1.0


def test_an_endpoint_that_is_not_there_is_named():
    error = told("--url", "http://127.0.0.1:9/v1", *SUMS)
    assert (error.field, error.value) == ("--url", "http://127.0.0.1:9/v1")
    assert "no answer from the endpoint" in error.why
    assert "start the server" in error.fix
    for url in ("127.0.0.1:9", "http://[::1", "http://127.0.0.1:99999/v1"):
        assert told("--url", url, *SUMS).why == "it is no address of a server"


@pytest.mark.parametrize("url", ["http://me:word@127.0.0.1:9/v1", "http://127.0.0.1:9/v1?key=word"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(url: str):
    error = told("--url", url, *SUMS)
    assert "no password and no query" in error.why
    assert "word" not in str(error).replace("password", "")


def test_an_address_without_its_version_says_what_to_add(server: Running):
    error = told("--url", server.url, *SUMS)
    assert "status 404" in error.why
    assert error.fix.endswith(f"{server.url}/v1")


def test_a_model_that_the_endpoint_has_not_is_named(server: Running):
    error = told("--url", address(server), "--model", "builtin://arithmetics", *SUMS)
    assert (error.field, error.value) == ("--model", "builtin://arithmetics")
    assert MODEL in error.fix


def test_a_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", KEY[::-1])
    with running(keys=(KEY,)) as server:
        url = ("--url", address(server), *SUMS)
        assert page(*url, "--api-key-env", "THE_KEY")["metrics"]["val/accuracy"] > 0
        without, wrong = told(*url), told(*url, "--api-key-env", "OTHER_KEY")
        unset = told(*url, "--api-key-env", "NO_SUCH_KEY")
    assert "without a key: status 401" in without.why
    assert "--api-key-env NAME" in without.fix
    assert "refuses the key: status 401" in wrong.why
    assert KEY[::-1] not in wrong.why
    assert "not set" in unset.why


def test_options_of_an_endpoint_need_one():
    assert told(MODEL, *SUMS, "--model", "a").field == "--url"
    assert told("--url", "http://127.0.0.1:9/v1", "--compare", "a.jsonl", "b.jsonl").field == (
        "CHECKPOINT"
    )


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "multi_turn.enable"),
        ("reward.reward_model.enable=true", "reward_model.enable"),
    ],
)
def test_what_takes_tokens_is_refused_by_name(server: Running, word: str, field: str):
    error = told("--url", address(server), "--data", ROWS, word)
    assert error.field.endswith(field)
    assert "a chat endpoint sends text" in error.why


# Endpoints that misbehave.


@contextmanager
def odd_server(*replies: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that gives one reply after the other, then the last one again."""
    left, bodies = list(replies), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "odd"}]})

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = left.pop(0) if len(left) > 1 else left[0]
            if status == 0:
                threading.Event().wait(2)
            self._send(status or 200, body)

        def _send(self, status: int, body: Any) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1", bodies
        finally:
            http.shutdown()


def completion(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "46"}
    choice = {"message": message, "finish_reason": "stop", **changes}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


ONE = ("--data", f"{ROWS}&size=1".replace("size=24&", ""), "--reward", "numeric")


def test_a_busy_endpoint_is_asked_again():
    with odd_server((503, {"error": {"message": "busy"}}), (200, completion())) as (url, bodies):
        found = page("--url", url, *ONE)
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert found["rollouts"][0]["answer"] == "46"
    assert set(bodies[0]) == {"model", "max_tokens", "temperature", "n", "seed", "messages"}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((0, {}), "no answer within 0.5 s"),
        ((500, {"error": "broken"}), "status 500: broken"),
        ((200, {"choices": []}), "it sent no chat completion"),
        ((200, {**completion(), "choices": 2 * completion()["choices"]}), "no chat completion"),
        ((200, completion(message={"content": None, "refusal": "no"})), "it refused: 'no'"),
        ((200, completion(message={"content": "4\ud800"})), "half of a surrogate pair"),
        ((200, {"choices": [{"message": {}, "finish_reason": "stop"}]}), "no chat completion"),
        ((200, completion(finish_reason="content_filter")), "'content_filter'"),
        ((200, completion(finish_reason={"a": 1})), "ended an answer by"),
        ((200, completion(message={"tool_calls": [{}]})), "tool calls"),
        ((200, {**completion(), "usage": {"completion_tokens": 10**15}}), "1000000000000000"),
        ((200, {**completion(), "usage": {"completion_tokens": -1}}), "-1"),
    ],
)
def test_replies_that_are_no_answers_say_what_they_are(reply: Any, said: str):
    limit = "actor_rollout_ref.rollout.server.request_timeout_s=0.5"
    with odd_server(reply) as (url, _):
        error = told("--url", url, *ONE, *FEW, limit)
    assert error.field == "--url"
    assert said in error.why
