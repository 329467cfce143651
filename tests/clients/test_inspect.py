"""inspect-ai against `luyen serve`: a task that generates, and one that calls a tool."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.data.sources import load_dataset
from tests.clients.conftest import FOLDER, Run
from tests.e2e.tiny import luyen
from tests.serving import MODEL, Running

ROWS = "arithmetic://sum?digits=2&split=held-out&size=16"


def written(folder: Path, pairs: list[tuple[str, str]]) -> Path:
    file = folder / "rows.jsonl"
    rows = [json.dumps({"question": ask, "answer": right}) for ask, right in pairs]
    file.write_text("\n".join(rows))
    return file


def evaluated(run: Run, server: Running, folder: Path, task: str, model: str, file: Path) -> Any:
    words = ("--model", f"openai-api/luyen/{model}", "-T", f"file={file}", "--display", "plain")
    words += ("--log-dir", folder / "logs", "--log-format", "json", "--temperature", "0")
    address = {"LUYEN_BASE_URL": f"{server.url}/v1", "LUYEN_API_KEY": "none"}
    run(
        *("-m", "inspect_ai", "eval", f"{FOLDER / 'inspect_task.py'}@{task}"),
        *words,
        INSPECT_EVAL_MODEL="none",
        **address,
    )
    [log] = (folder / "logs").glob("*.json")
    return json.loads(log.read_text())


def test_a_task_is_as_accurate_as_here(sums: Running, run: Run, tmp_path: Path):
    prompts = load_dataset([ROWS]).prompts
    pairs = [(p.messages[-1]["content"], str(p.ground_truth)) for p in prompts]
    log = evaluated(run, sums, tmp_path, "sums", "sums", written(tmp_path, pairs))
    assert log["status"] == "success"
    here = luyen("eval", MODEL, "--data", ROWS, "--reward", "numeric", "--json")
    accuracy = json.loads(here.stdout)["metrics"]["val/accuracy"]
    assert 0 < accuracy < 1
    found = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    assert found == pytest.approx(accuracy)


def test_a_task_with_a_tool_gets_the_tools_results(caller: Running, run: Run, tmp_path: Path):
    pairs = [("19*93=", "1767"), ("12*34=", "408"), ("71*28=", "1988")]
    log = evaluated(run, caller, tmp_path, "products", "caller", written(tmp_path, pairs))
    assert log["status"] == "success"
    used = [m for sample in log["samples"] for m in sample["messages"] if m["role"] == "tool"]
    assert used
    assert all(message["function"] == "calculator" for message in used)
    results = {message["content"] for message in used}
    assert any(result.startswith(("product ", "not a product")) for result in results)
    answers = [sample["messages"][-1] for sample in log["samples"]]
    assert {message["role"] for message in answers} == {"assistant"}
