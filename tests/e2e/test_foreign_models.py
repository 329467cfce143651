"""Models that the fast path cannot run, from check to eval, through transformers itself."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from luyen.base.errors import UserError
from tests.e2e.tiny import luyen
from tests.foreign_models import KINDS, foreign_model
from tests.runs import ACTOR, MODEL, ROLLOUT, TINY, read_back

OF_A_RANDOM_MODEL = (f"{MODEL}.init", f"{MODEL}.override_config", f"{MODEL}.enable_gradient")
ONLINE = tuple(word for word in TINY if not word.startswith(OF_A_RANDOM_MODEL))
SUPERVISED = (
    "trainer.stage=sft",
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_max_token_len_per_gpu=512",
    f"{ACTOR}.ppo_mini_batch_size=4",
    "trainer.logger=jsonl",
    "trainer.total_training_steps=2",
)


@pytest.fixture(scope="module", params=[*KINDS, "own"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_model(request.param, tmp_path_factory.mktemp("model") / request.param)


def words_of(model: Path, folder: Path) -> list[str]:
    """A file that says next to nothing, the model, and where the run goes."""
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text("trainer: {experiment_name: foreign}\n")
    return [
        str(file),
        f"{MODEL}.path={model}",
        *trust(model),
        f"trainer.default_local_dir={folder}",
    ]


def trust(model: Path) -> list[str]:
    return [f"{MODEL}.trust_remote_code=true"] if model.name == "own" else []


def sound(done: Result) -> None:
    assert done.exit_code == 0, done.output


def trained(model: Path, folder: Path, *words: str) -> Path:
    sound(luyen("train", *words_of(model, folder), *words))
    return folder / "luyen" / "foreign"


def test_a_policy_learns_goes_on_and_is_measured(model: Path, tmp_path: Path):
    words = (*ONLINE, f"{ROLLOUT}.name=hf")
    sound(luyen("check", *words_of(model, tmp_path), *words))
    whole = read_back(trained(model, tmp_path / "whole", *words))
    for steps in (1, 2):
        last = f"trainer.total_training_steps={steps}"
        root = trained(model, tmp_path / "parts", *words, last)
    parts = read_back(root)
    for ran in (whole, parts):
        assert [norm > 0 for norm in ran.course("actor/grad_norm")] == [True, True]
        assert max(ran.course("parity/max_gap")) < 1e-4
    assert all(torch.equal(parts.weights[name], one) for name, one in whole.weights.items())
    out = tmp_path / "exported"
    sound(luyen("export", root, out))
    asked = ("--data", "arithmetic://sum?digits=1&split=held-out", "--samples", "2")
    short = ("data.max_prompt_length=32", "data.max_response_length=6")
    for checkpoint in (root, out):
        sound(luyen("eval", checkpoint, *trust(model), *short, *asked))
    if model.name == "gpt2":
        done = luyen("eval", out, *asked)
        assert isinstance(done.exception, UserError)
        assert "at most 256" in done.exception.why


def test_answers_that_are_given_are_learned(model: Path, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    said = [("user", "1+2="), ("assistant", "3")]
    talk = {"messages": [{"role": role, "content": content} for role, content in said]}
    rows.write_text(f"{json.dumps(talk)}\n" * 8)
    words = (*SUPERVISED, f"data.train_files={rows}", "data.filter_duplicates=false")
    sound(luyen("check", *words_of(model, tmp_path), *words))
    done = read_back(trained(model, tmp_path, *words))
    assert len(done.metrics) == 2


@pytest.mark.parametrize("kind", ["falcon", "mamba"])
def test_check_says_what_native_cannot_do_and_what_is_not_known(kind: str, tmp_path: Path):
    words = (*words_of(foreign_model(kind, tmp_path / kind), tmp_path), *ONLINE)
    refused = luyen("check", *words)
    assert refused.exit_code == 1
    assert f"sequences of a {kind} model cannot be packed" in refused.output
    assert "set it to hf" in refused.output
    shown = luyen("check", *words, f"{ROLLOUT}.name=hf").output
    assert f"Memory: unknown, since transformers itself runs a {kind} model; the files of" in shown
