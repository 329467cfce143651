"""No key of a configuration is without effect: each changes the plan or the run, or is refused."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models import hf_loading, load
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.start import run_training
from tests.architecture.tree import ROOT
from tests.e2e.key_cases import CASES, COUNTED, CRITIC, KL_LOSS, THREE
from tests.runs import ACTOR, Ran, close, prepare, report_of, same_weights, train

HERE = Path(__file__).parent
REF = "actor_rollout_ref.ref"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in braces in the cases."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {
            "data_source": "arithmetic/sum",
            "kind": "unheard-of",
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "question": [{"role": "user", "content": f"{i}+2="}],
            "reward_model": {"ground_truth": str(i + 1)},
        }
        for i in range(16)
    ]
    rows.write_text("\n".join(json.dumps(line) for line in lines))
    return {
        "{rows}": str(rows),
        "{sampler}": str(ROOT / "examples" / "extension" / "plugin.py"),
        "{reward}": str(HERE / "half_right_reward.py"),
        "{few}": "data.train_max_samples=4",
    }


def filled(words: tuple[str, ...], files: dict[str, str]) -> tuple[str, ...]:
    for mark, path in files.items():
        words = tuple(word.replace(mark, path) for word in words)
    return words


@cache
def usual(folder: Path, words: tuple[str, ...]) -> Ran:
    return train(folder, "trainer.total_training_steps=1", *words)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usual")


@pytest.mark.parametrize("key", [k for k, case in CASES.items() if case[0] == "plan"])
def test_the_key_changes_the_plan(key: str, files: dict[str, str], tmp_path: Path):
    _, value, given = CASES[key]
    before, after = (report_of(tmp_path, *given, *w) for w in ((), (f"{key}={value}",)))
    assert before.is_sound, before.problems
    assert after.is_sound, after.problems
    assert after.plan != before.plan


@pytest.mark.parametrize("key", [k for k, case in CASES.items() if case[0] == "refused"])
def test_the_key_is_refused_with_a_reason(key: str, files: dict[str, str], tmp_path: Path):
    _, value, given = CASES[key]
    given = filled(given, files)
    before, after = (report_of(tmp_path, *given, *w) for w in ((), (f"{key}={value}",)))
    known = {(p.field, p.why) for p in before.problems}
    new = [p for p in after.problems if p.severity == "error" and (p.field, p.why) not in known]
    assert new
    assert all(problem.why and problem.fix for problem in new)


@pytest.mark.parametrize("key", [k for k, case in CASES.items() if case[0] == "warned"])
def test_the_key_is_said_to_have_no_effect_here(key: str, tmp_path: Path):
    _, value, given = CASES[key]
    before, after = (report_of(tmp_path, *given, *w) for w in ((), (f"{key}={value}",)))
    assert after.is_sound, after.problems
    new = [p for p in after.problems if p not in before.problems]
    assert [problem.field for problem in new] == [key]
    assert "no effect" in new[0].why


@pytest.mark.parametrize("key", [k for k, case in CASES.items() if case[0] == "stopped"])
def test_the_key_stops_the_run_before_its_first_step(
    key: str, files: dict[str, str], tmp_path: Path
):
    _, value, given = CASES[key]
    report = report_of(tmp_path, *filled((*given, f"{key}={value}"), files))
    assert report.is_sound, report.problems
    with pytest.raises(UserError) as caught:
        run_training(report)
    assert caught.value.why
    assert not list(tmp_path.rglob("step_*"))


@pytest.mark.parametrize("key", [k for k, case in CASES.items() if case[0] == "run"])
def test_the_key_changes_the_run(
    key: str, files: dict[str, str], base_folder: Path, tmp_path: Path
):
    _, value, given = CASES[key]
    given, word = filled(given, files), filled((f"{key}={value}",), files)
    before = usual(base_folder / str(abs(hash(given))), given)
    after = train(tmp_path, "trainer.total_training_steps=1", *given, *word)
    assert after.metrics != before.metrics or not same_weights(after, before)


def test_how_passes_are_cut_reaches_the_roles(tmp_path: Path):
    pairs = f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
    words = {
        f"{REF}.log_prob_max_token_len_per_gpu": ("600", KL_LOSS),
        f"{REF}.log_prob_use_dynamic_bsz": ("true", (*KL_LOSS, *COUNTED)),
        f"{REF}.log_prob_micro_batch_size_per_gpu": ("8", (*KL_LOSS, *COUNTED)),
        "critic.ppo_micro_batch_size_per_gpu": ("1", (*CRITIC, COUNTED[0], pairs)),
    }
    for index, (key, (value, given)) in enumerate(words.items()):
        passes = []
        for name, word in (("before", ()), ("after", (f"{key}={value}",))):
            run = prepare(tmp_path / f"{index}{name}", *given, *word)
            cut = run.roles.micro_batching
            passes.append((cut.reference, cut.critic))
            close(run)
        assert passes[0] != passes[1], key


def test_the_life_of_a_run_follows_its_keys(tmp_path: Path):
    words = ("trainer.save_freq=1", "trainer.project_name=mine", "trainer.experiment_name=first")
    done = train(tmp_path, *THREE, *words, "trainer.logger=[jsonl, tensorboard]")
    assert done.root == tmp_path / "mine" / "first"
    assert len(list((done.root / "checkpoints").glob("step_*"))) == 3
    assert list((done.root / "tensorboard").iterdir())


def test_a_run_is_not_begun_twice_where_resuming_is_off(tmp_path: Path):
    train(tmp_path)
    report = report_of(tmp_path, "trainer.resume_mode=disable")
    assert "trainer.resume_mode" in {p.field for p in report.problems if p.severity == "error"}


def test_a_sampler_class_of_your_own_is_the_one_that_draws(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class First:\n"
        "    def __init__(self, prompts, *, seed): pass\n"
        "    def take(self, cursor, count): return [0] * count\n"
    )
    words = (f"data.sampler.class_path={file}", "data.sampler.class_name=First")
    done = train(tmp_path / "runs", *words)
    drawn = read_rollouts(done.root / "rollouts" / "step_000002.parquet")
    assert len({recorded.rollout.group.uid for recorded in drawn}) == 1


def test_code_that_comes_with_a_model_is_run_only_when_trusted(monkeypatch: pytest.MonkeyPatch):
    trusted: list[bool] = []

    def refuse(*_: Any, trust_remote_code: bool, **__: Any) -> None:
        trusted.append(trust_remote_code)
        raise ValueError("no model")

    monkeypatch.setattr(hf_loading.AutoConfig, "from_pretrained", refuse)
    for trust in (False, True):
        with pytest.raises(UserError, match="no model"):
            load.load_policy(ModelConfig(trust_remote_code=trust), device="cpu", vocabulary=8)
    assert trusted == [False, True]
