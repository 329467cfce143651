"""Secrets are planted wherever a run can be given one, and looked for in all that it leaves."""

import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.forked_python import forked_python
from tests.runs import TINY

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    if len(solution_str) % 2:
        raise ValueError(f"the server refused {sorted(kwargs.items())}")
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
PLUGIN = (  # inside a function: a check finds what certainly fails
    "import os\ndef login():\n    raise RuntimeError('no login with ' + "
    "os.environ['PLANTED_PLUGIN'])\n"
    "login()\n"
)
WANDB = """
import json, os, sys
class Table:
    def __init__(self, **kwargs):
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps(kwargs, default=str))
class Run:
    def log(self, values, step): pass
    def save(self, *args, **kwargs): pass
    def finish(self): pass
def init(**kwargs):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps([sys.argv, kwargs], default=str))
    return Run()
"""
KWARGS = "reward.custom_reward_function.reward_kwargs"
PRIVATE = ("config.yaml", "manifest.json", "provenance.json", "resumptions.json")


class Judge(BaseHTTPRequestHandler):
    """Scores by the length of what was asked, and repeats all it was sent in every third answer."""

    count = 0

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        Judge.count += 1
        content = f"{len(asked) % 10}"
        status, body = 200, json.dumps({"choices": [{"message": {"content": content}}]})
        if Judge.count % 3 == 0:
            said = f"refused {self.headers['Authorization']} at {self.path}"
            status, body = 400, json.dumps({"error": {"message": said}})
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def luyen(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SEEN": str(folder / "seen.json"), **variables}
    env["PYTHONPATH"] = os.pathsep.join([str(folder / "modules"), os.environ.get("PYTHONPATH", "")])
    command = [forked_python(), "-m", "luyen", *words]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Every file below a folder as text; columns of parquet files as they were before packing."""
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        name = file.relative_to(root).as_posix()
        yield name, file.read_bytes().decode("latin-1")
        if file.suffix == ".parquet":
            yield name, repr(pq.read_table(file).to_pylist())


def demand_nothing(root: Path, told: str, allowed: tuple[str, ...] = ()) -> None:
    """No planted value in a file or in what was printed; `allowed` stand in config.yaml alone."""
    seen = {**dict(texts(root)), "what was printed": told}
    for name, text in seen.items():
        if name == "config.yaml":
            for value in allowed:
                text = text.replace(value, "")
        assert "planted" not in text, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "modules" / "wandb").mkdir(parents=True)
    (tmp_path / "modules" / "wandb" / "__init__.py").write_text(WANDB)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "base.yaml").write_text("trainer: {}\n")
    return tmp_path


def tiny(folder: Path) -> list[str]:
    kept = [word for word in TINY if "custom_reward_function" not in word and "logger" not in word]
    return [*kept, f"trainer.default_local_dir={folder / 'runs'}", "reward.on_fault=drop"]


def test_a_run_with_secrets_in_its_reward_leaves_none_of_them(folder: Path):
    (folder / "config.yaml").write_text(
        "reward: {custom_reward_function: {path: reward.py, reward_kwargs: {"
        "key: '${oc.env:PLANTED_KWARG}', url: 'http://me:planted-url@host/?token=planted-query',"
        " password: planted-literal}}}\n"
    )
    words = ["train", "config.yaml", *tiny(folder), "trainer.logger=[console, jsonl, wandb]"]
    words += [f"{KWARGS}.api_key=planted-word", "trainer.val_before_train=false"]
    variables = {
        "PLANTED_KWARG": "planted-by-environment",
        "TORCH_API_TOKEN": "planted-setting",
        "CUDA_PROXY": "http://me:planted-proxy@host",
    }
    done = luyen(folder, *words, **variables)
    assert done.returncode == 0, done.stderr
    [root] = [path.parent for path in folder.glob("runs/*/*/manifest.json")]
    demand_nothing(root, done.stdout + done.stderr, allowed=("planted-literal", "planted-word"))
    kept = (root / "config.yaml").read_text()
    assert "key: ${oc.env:PLANTED_KWARG}" in kept
    assert "http://***@host/?token=***" in kept
    assert "the server refused" in dict(texts(root / "rollouts"))["step_000001.parquet"]
    for name in PRIVATE:
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600, name
    seen = (folder / "seen.json").read_text()
    assert "${oc.env:PLANTED_KWARG}" in seen
    assert "planted" not in seen
    # The index beside the runs, and what reads a run, hold none either.
    assert "planted" not in (folder / "runs" / "artifacts.jsonl").read_text()
    again = [["report", str(root)], ["doctor", str(root)], ["diff", str(root), str(root)], ["runs"]]
    for command in again:
        shown = luyen(folder, *command, **variables)
        demand_nothing(root, shown.stdout + shown.stderr, ("planted-literal", "planted-word"))


def test_a_run_with_a_judge_leaves_no_key_and_no_password(folder: Path, judge: str):
    block = {
        "base_url": f"http://me:planted-pw@{judge}/v1?api_key=planted-query",
        "api_key_env": "PLANTED_JUDGE",
        "prompt": "Rate {answer}",
        "retries": 0,
    }
    parts = json.dumps({"rating": {"judge": block}})
    words = ["train", "base.yaml", *tiny(folder), "trainer.logger=[console, jsonl]"]
    words += [f"reward.components={parts}", "reward.cache.enable=true"]
    done = luyen(folder, *words, PLANTED_JUDGE="planted-judge-key")
    assert done.returncode == 0, done.stderr
    [root] = [path.parent for path in folder.glob("runs/*/*/manifest.json")]
    demand_nothing(root, done.stdout + done.stderr)
    assert "refused Bearer" in dict(texts(root / "rollouts"))["step_000001.parquet"]
    without = luyen(folder, "reproduce", str(root), PLANTED_JUDGE="planted-judge-key")
    assert without.returncode == 2
    assert "stands for a password" in without.stdout + without.stderr


def test_what_foreign_code_raises_is_printed_without_secrets(folder: Path):
    words = [
        "train",
        "base.yaml",
        *tiny(folder),
        "trainer.plugins=[plugin.py]",
        f"{KWARGS}.a=${{oc.env:PLANTED_PLUGIN}}",
    ]
    done = luyen(folder, *words, PLANTED_PLUGIN="planted-in-a-traceback")
    assert done.returncode != 0
    assert "no login with ${oc.env:PLANTED_PLUGIN}" in done.stderr
    assert "planted" not in done.stdout + done.stderr
