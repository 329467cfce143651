"""The studio answers its own page with its token, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.base.rundir import RunDirectory
from tests.unit.web.server import Client, serving

CONFIG = "trainer: {stage: rl, total_training_steps: 3}\n"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("runs")
    RunDirectory.create(root / "p" / "a", config=CONFIG, provenance={}, manifest={})
    with serving(root) as found:
        yield found


def test_the_token_in_the_address_becomes_a_cookie(client: Client):
    reply = client.ask(f"/?token={client.access.token}", is_known=False)
    assert (reply.status, reply.headers["location"]) == (303, "/")
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    pair = cookie.partition(";")[0]
    reply = client.ask("/api/v1/session", is_known=False, headers={"Cookie": pair})
    assert reply.status == 200
    assert reply.json["languages"] == ["en", "vi"]


def test_without_the_token_the_page_says_where_it_is_and_no_data_is_given(client: Client):
    page = client.ask("/", is_known=False)
    assert page.status == 401
    assert b"terminal" in page.body
    for path in ("/api/v1/runs", "/api/v1/session", "/api/v1/openapi.json", "/api/v1/docs"):
        reply = client.ask(path, is_known=False)
        assert reply.status == 401, path
        assert reply.json["error"]["field"] == "token"
    wrong = {"Authorization": "Bearer " + "x" * 32, "Cookie": f"{client.access.cookie}=x"}
    assert client.ask("/api/v1/runs", is_known=False, headers=wrong).status == 401
    assert client.ask("/?token=wrong", is_known=False).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:PORT"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "127.0.0.1@evil.example:PORT"}, 421),
        ({"Host": "127.0.0.1:PORT:PORT"}, 421),
        ({"Host": "localhost:PORT"}, 200),
        ({"Host": "[::1]:PORT"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://127.0.0.1:PORT"}, 403),
        ({"Origin": "http://127.0.0.1:PORT"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_other_names_and_other_pages_are_refused_even_with_the_token(
    client: Client, headers: dict[str, str], status: int
):
    sent = {name: value.replace("PORT", str(client.port)) for name, value in headers.items()}
    assert client.ask("/api/v1/session", headers=sent).status == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain", "X-Luyen-Studio": "1"},
        {"Content-Type": "application/x-www-form-urlencoded", "X-Luyen-Studio": "1"},
        {"X-Luyen-Studio": "1"},
        {"Content-Type": "application/json"},
    ],
)
def test_a_change_needs_what_another_site_cannot_send(client: Client, headers: dict[str, str]):
    for method in ("POST", "PUT", "DELETE"):
        reply = client.ask("/api/v1/check", method=method, headers=headers, body=b"{}")
        assert reply.status in (403, 415)


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/runs/..%2f..%2fetc",
        "/api/v1/runs/%2e%2e",
        "/api/v1/runs/a-00000000",
        "/api/v1/runs/../../etc/passwd",
        "/..%2f..%2f..%2fpyproject.toml",
        "/assets/..%2f..%2fapp.py",
        "/%00.js",
    ],
)
def test_paths_out_of_the_folder_are_refused(client: Client, path: str):
    reply = client.ask(path)
    assert reply.status in (404, 503), reply.body
    assert b"root:" not in reply.body
    assert b"import" not in reply.body


def test_every_reply_forbids_foreign_content(client: Client):
    for path in ("/", "/api/v1/session", "/nothing.js"):
        headers = client.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_a_huge_body_is_refused_before_it_is_read(client: Client):
    headers = {"Content-Type": "application/json", "X-Luyen-Studio": "1"}
    sized = {**headers, "Content-Length": str(10**9)}
    assert client.ask("/api/v1/check", method="POST", headers=sized).status == 413


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    RunDirectory.create(outside, config=CONFIG, provenance={}, manifest={})
    (outside / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    root = tmp_path / "runs"
    RunDirectory.create(root / "p" / "a", config=CONFIG, provenance={}, manifest={})
    (root / "p" / "a" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (root / "p" / "linked").symlink_to(outside)
    with serving(root) as client:
        run_id = client.only_run()
        [row] = client.get("/runs")["runs"]
        assert row["state"] == "damaged"
        assert "link out of the folder" in row["problem"]
        assert row["sparkline"] == []
        assert client.ask(f"/api/v1/runs/{run_id}/series?name=reward/mean").status == 409
        assert client.get(f"/runs/{run_id}")["damage"][0]["message"] == row["problem"]


def test_a_browser_that_has_the_page_gets_it_once(client: Client):
    first = client.ask("/studio.js")
    known = {
        "Authorization": f"Bearer {client.access.token}",
        "If-None-Match": first.headers["etag"],
    }
    again = client.ask("/studio.js", headers=known)
    assert (first.status, again.status) == (200, 304)
    assert len(first.body) > 100_000
    assert again.body == b""
