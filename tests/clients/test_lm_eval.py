"""lm-eval against `luyen serve`: a task that generates, and one that scores given answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luyen.data.render import Renderer
from luyen.data.sources import load_dataset
from luyen.data.tokenizer import load_tokenizer, resolve_path
from luyen.rollout.prompt_scores import prompt_logps
from tests.clients.conftest import FOLDER, Run
from tests.e2e.tiny import luyen
from tests.serving import MODEL, Running

ROWS = "arithmetic://sum?digits=2&split=held-out&size=16"


def questions(folder: Path) -> list[dict[str, Any]]:
    """The rows of the tasks, in a file beside their descriptions."""
    renderer = Renderer(load_tokenizer(MODEL))
    found: list[dict[str, Any]] = []
    for prompt in load_dataset([ROWS]).prompts:
        right = str(prompt.ground_truth)
        row = {
            "question": prompt.messages[-1]["content"],
            "answer": right,
            # lm-eval moves blanks at the end of a prompt to the answers; there they stand.
            "rendered": opened(renderer, prompt.messages).rstrip("\n"),
            "choices": [right, str(int(right) + 1), str(int(right) + 10)],
        }
        found.append(row)
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    for name in ("sums.yaml", "sums_choice.yaml"):
        text = (FOLDER / name).read_text().replace("sums.jsonl", str(folder / "sums.jsonl"))
        (folder / name).write_text(text)
    return found


def opened(renderer: Renderer, messages: Sequence[Any]) -> str:
    """The prompt up to where the assistant speaks."""
    tokens = renderer.prompt_tokens(messages)
    return renderer.tokenizer.decode(tokens, skip_special=False)


def results(folder: Path) -> dict[str, Any]:
    [file] = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def samples(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def evaluated(run: Run, folder: Path, task: str, *words: str) -> Path:
    out = folder / "out"
    options = ("--include_path", folder, "--output_path", out, "--log_samples")
    run("-m", "lm_eval", "run", "--tasks", task, *options, *words)
    return out


def test_answers_through_a_chat_endpoint_are_as_accurate_as_here(
    sums: Running, run: Run, tmp_path: Path
):
    rows = questions(tmp_path)
    address = f"base_url={sums.url}/v1/chat/completions"
    out = evaluated(
        run,
        tmp_path,
        "sums",
        *("--model", "local-chat-completions", "--apply_chat_template"),
        *("--model_args", f"model=sums,{address},num_concurrent=8,max_length=512"),
    )
    here = luyen("eval", MODEL, "--data", ROWS, "--reward", "numeric", "--json")
    assert here.exit_code == 0, here.output
    accuracy = json.loads(here.stdout)["metrics"]["val/accuracy"]
    assert 0 < accuracy < 1
    assert results(out)["sums"]["exact_match,none"] == pytest.approx(accuracy)
    assert len(samples(out)) == len(rows)


@pytest.mark.parametrize("tokenized", ["True", "False"])
def test_log_likelihoods_of_given_answers_are_those_of_the_trainer(
    sums: Running, run: Run, tmp_path: Path, tokenized: str
):
    rows = questions(tmp_path)
    tokenizer = resolve_path(MODEL)
    address = f"base_url={sums.url}/v1/completions,tokenizer={tokenizer}"
    more = f"num_concurrent=4,max_length=512,tokenized_requests={tokenized}"
    out = evaluated(
        run,
        tmp_path,
        "sums_choice",
        *("--model", "local-completions", "--model_args", f"model=sums,{address},{more}"),
    )
    found = samples(out)
    expected = [
        [own_score(sums, row["rendered"], f"\n{text}") for text in row["choices"]] for row in rows
    ]
    for row, scores in zip(found, expected, strict=True):
        given = [float(response[0][0]) for response in row["resps"]]
        assert given == pytest.approx(scores, abs=1e-4)
    best = [scores.index(max(scores)) == 0 for scores in expected]
    assert results(out)["sums_choice"]["acc,none"] == pytest.approx(sum(best) / len(best))
    assert sum(best) > 0


def own_score(sums: Running, question: str, answer: str) -> float:
    model = sums.engine.model
    encode = model.tokenizer.encode
    before: Sequence[int] = encode(question)
    [scores] = prompt_logps(model.loaded.policy, [(*before, *encode(answer))], top=0)
    return sum(logp for logp in scores.logps[len(before) :] if logp is not None)
