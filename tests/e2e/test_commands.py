"""Train, then measure, talk with, export and test what was trained."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from luyen.base.errors import UserError
from luyen.base.files import read_lines
from luyen.config.schema.model import ModelConfig
from luyen.models.load import load_policy
from luyen.pipeline.policy_loading import LoadedPolicy, open_checkpoint
from tests.e2e.tiny import luyen, random_model, train

transformers = pytest.importorskip("transformers")
AutoModelForCausalLM = transformers.AutoModelForCausalLM
AutoTokenizer = transformers.AutoTokenizer
GenerationConfig = transformers.GenerationConfig

TEXTS = ("12+34=46", "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2", "abc")
SAMPLED = (
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("runs"), *SAMPLED)


@pytest.fixture(scope="module")
def lora_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.1")
    return train(model, tmp_path_factory.mktemp("lora"), *lora)


def our_logps(opened: LoadedPolicy) -> list[float]:
    """Log-probabilities of every token but the first of each text, by the training forward."""
    ids = [opened.tokenizer.encode(text) for text in TEXTS]
    mask = torch.tensor([place > 0 for some in ids for place in range(len(some))])
    tokens = torch.tensor([token for some in ids for token in some])
    return opened.policy(tokens, [len(some) for some in ids], mask).logp.tolist()


def plain_logps(net: torch.nn.Module, directory: Path) -> list[float]:
    """The same by plain transformers, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found: list[float] = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logp = torch.log_softmax(net(input_ids=ids).logits[0].float(), -1)
        found += logp[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_run_directory_opens_as_its_newest_checkpoint_with_trained_weights(
    run: Path, model: Path
) -> None:
    opened = open_checkpoint(str(run))
    assert opened.step == 1
    assert opened.name == str(run / "checkpoints" / "step_000001")
    again = open_checkpoint(opened.name)
    assert our_logps(opened) == our_logps(again)
    assert our_logps(opened) != our_logps(open_checkpoint(str(model)))


def test_an_export_gives_the_same_logps_in_plain_transformers(run: Path, tmp_path: Path) -> None:
    done = luyen("export", run, tmp_path / "exported")
    assert done.exit_code == 0, done.output
    opened = open_checkpoint(str(run))
    exported = tmp_path / "exported"
    net = AutoModelForCausalLM.from_pretrained(exported)
    assert net.dtype == torch.float32
    # Through our own forward the exported weights give the very same bits.
    assert our_logps(open_checkpoint(str(exported))) == our_logps(opened)
    # In double precision the kernels' rounding is out of the way: the functions are the same.
    opened.policy.double()
    assert furthest(plain_logps(net.double(), exported), our_logps(opened)) < 2e-6
    stops = GenerationConfig.from_pretrained(exported).eos_token_id
    assert set(stops) == opened.tokenizer.stop_ids
    assert AutoTokenizer.from_pretrained(exported).chat_template is not None
    assert "luyen" not in (exported / "config.json").read_text()


def test_an_export_leaves_the_weights_readable_for_others(run: Path, tmp_path: Path) -> None:
    luyen("export", run, tmp_path / "exported")
    modes = {file.stat().st_mode for file in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1


def test_an_export_refuses_a_directory_with_files(run: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    done = luyen("export", run, tmp_path)
    assert isinstance(done.exception, UserError)
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_a_lora_export_loads_with_peft_and_merges_without_touching_the_live_model(
    lora_run: Path, model: Path, tmp_path: Path
) -> None:
    opened = open_checkpoint(str(lora_run))
    expected = our_logps(opened)
    assert furthest(expected, our_logps(open_checkpoint(str(model)))) > 1e-3
    assert luyen("export", lora_run, tmp_path / "adapter").exit_code == 0
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert furthest(plain_logps(adapted, tmp_path / "adapter"), expected) < 2e-5
    done = luyen("export", lora_run, tmp_path / "merged", "--merge")
    assert done.exit_code == 0, done.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert furthest(plain_logps(merged, tmp_path / "merged"), expected) < 1e-4
    assert our_logps(open_checkpoint(str(tmp_path / "adapter"))) == expected


def test_an_exported_adapter_is_where_a_lora_run_can_start(
    lora_run: Path, model: Path, tmp_path: Path
) -> None:
    luyen("export", lora_run, tmp_path / "adapter")
    block = ModelConfig(path=str(model), lora_rank=4, lora_adapter_path=str(tmp_path / "adapter"))
    opened = open_checkpoint(str(lora_run))
    policy = load_policy(block, device="cpu", vocabulary=opened.tokenizer.size)
    wanted = dict(opened.policy.named_parameters())
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_merging_needs_an_adapter(run: Path, tmp_path: Path) -> None:
    done = luyen("export", run, tmp_path / "merged", "--merge")
    assert isinstance(done.exception, UserError)
    assert not (tmp_path / "merged").exists()


def test_eval_finds_what_the_runs_own_validation_found(run: Path, tmp_path: Path) -> None:
    done = luyen("eval", run, "--json", "--out", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    logged = [line for line in read_lines(run / "metrics.jsonl") if "val/accuracy" in line][-1]
    assert 0 < report["metrics"]["val/accuracy"] < 1
    assert report["metrics"] == {name: logged[name] for name in report["metrics"]}
    assert {"val/accuracy", "val/pass@4", "val/accuracy_low"} <= set(report["metrics"])
    whole = json.loads((tmp_path / "report.json").read_text())
    assert len(whole["rollouts"]) == 24 * 4
    assert len(report["rollouts"]) == 3 * 4


def test_eval_prints_a_table_and_samples_and_takes_overrides(run: Path) -> None:
    before = sorted(run.rglob("*"))
    done = luyen("eval", run, "data.val_max_samples=5", "actor_rollout_ref.rollout.val_kwargs.n=1")
    assert done.exit_code == 0, done.output
    assert "5 prompts x 1 sample" in done.output
    assert "arithmetic/sum" in done.output
    assert "ground truth" in done.output
    assert sorted(run.rglob("*")) == before


def test_chat_answers_and_remembers_what_was_said(run: Path) -> None:
    done = luyen("chat", run, "--message", "1+2=", "--message", "3+4=")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()[:2]
    alone = luyen("chat", run, "--message", "3+4=").stdout.splitlines()[0]
    assert first
    assert second != alone
    piped = luyen("chat", run, stdin="1+2=\n\n3+4=\n")
    assert piped.stdout == done.stdout


def test_chat_on_an_export_says_what_the_checkpoint_says(run: Path, tmp_path: Path) -> None:
    luyen("export", run, tmp_path / "exported")
    words = ("--message", "12+34=", "--max-tokens", "8")
    assert luyen("chat", tmp_path / "exported", *words).stdout == luyen("chat", run, *words).stdout


def test_the_selftest_of_a_checkpoint_passes(run: Path) -> None:
    done = luyen("selftest", run, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert report["ok"]
    found = {proof["name"]: proof["state"] for proof in report["proofs"]}
    assert found["native against hf"] == "ok"
    assert found["rendering, two turns"] == "ok"


def test_the_starter_is_sound_and_trains(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert luyen("init", tmp_path / "mine").exit_code == 0
    monkeypatch.chdir(tmp_path / "mine")
    checked = luyen("check", "config.yaml")
    assert checked.exit_code == 0
    assert "No problems" in checked.output
    done = luyen(
        "train",
        "config.yaml",
        f"actor_rollout_ref.model.path={model}",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)  # its paths are meant from its file
    assert luyen("check", "mine/config.yaml").exit_code == 0
    monkeypatch.chdir(tmp_path / "mine")
    metrics = read_lines(Path("runs/starter/first/metrics.jsonl"))
    assert math.isfinite(metrics[-1]["val/accuracy"])
    assert luyen("eval", "runs/starter/first").exit_code == 0


def test_the_starter_has_something_to_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert luyen("init", tmp_path / "mine").exit_code == 0
    monkeypatch.chdir(tmp_path / "mine")
    assert luyen("train", "config.yaml").exit_code == 0
    found = read_lines(Path("runs/starter/first/metrics.jsonl"))
    values = [line["val/accuracy"] for line in found if "val/accuracy" in line]
    assert values[0] < 0.6
    assert values[-1] > values[0] + 0.2


def test_a_checkpoint_out_of_its_run_is_explained(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "step_000001"
    moved.symlink_to(run / "checkpoints" / "step_000001")
    with pytest.raises(UserError, match="what they are weights of"):
        open_checkpoint(str(moved))


def test_a_checkpoint_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not those of the model"):
        open_checkpoint(str(run), ["actor_rollout_ref.model.lora_rank=4"])
