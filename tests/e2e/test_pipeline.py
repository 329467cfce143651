"""Two stages in one file: killed anywhere, called again, and with something changed in between."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.telemetry.artifact_registry import ArtifactRegistry
from luyen.telemetry.artifacts import difference
from tests.e2e.recipes import PIPELINES
from tests.kill.zygote import KILLED, Zygote
from tests.runs import SHAPE

REWARD = Path(__file__).parent.parent / "shares_reward.py"
PIPELINE = f"""
name: demo
defaults:
  trainer: {{logger: [jsonl], seed: 3, save_freq: 1}}
  data: {{max_prompt_length: 32, max_response_length: 6, train_batch_size: 4}}
  actor_rollout_ref:
    model: {{enable_gradient_checkpointing: false}}
    actor: {{ppo_mini_batch_size: 4, ppo_max_token_len_per_gpu: 512, optim: {{lr: 1.0e-3}}}}
stages:
  - name: sft
    config:
      trainer: {{stage: sft, total_training_steps: 2}}
      data: {{train_files: ["ROWS"], filter_duplicates: false}}
      actor_rollout_ref:
        model:
          path: builtin://arithmetic
          init: random
          override_config: {SHAPE} num_key_value_heads: 1, head_dim: 16, initializer_range: 0.2}}
  - name: rl
    config:
      trainer: {{total_training_steps: 3, max_ckpt_to_keep: 1}}
      data: {{train_files: ["arithmetic://sum?digits=1&size=32"]}}
      actor_rollout_ref:
        model: {{path: "artifact:sft"}}
        rollout: {{n: 4}}
      algorithm: {{adv_estimator: grpo}}
      reward: {{custom_reward_function: {{path: "{REWARD}"}}}}
"""
DEATHS = {
    "the first stage has nothing noted": ("luyen.train.lineage:note", "before", 1),
    "its checkpoint is not in place": (
        "luyen.checkpoint.store:CheckpointStore._put", "before", 2),
    "its checkpoint is not noted": ("luyen.train.lineage:CheckpointNotes.kept", "before", 2),
    "it is not exported": ("luyen.pipeline.run:export_stage", "before", 1),
    "the export is not whole": ("luyen.pipeline.export:export_tokenizer", "before", 1),
    "the export is not noted": ("luyen.pipeline.export:_note", "before", 1),
    "the second stage is in a step": ("luyen.train.loop:finish_step", "before", 2),
    "an old checkpoint is about to go": ("luyen.checkpoint.store:_remove", "before", 4),
    "the second export is noted": ("luyen.pipeline.export:_note", "after", 2),
}  # fmt: skip
QUICKEST = "pipeline_sft_rl"
LONGER = [pytest.param(n, marks=pytest.mark.slow) for n in sorted(set(PIPELINES) - {QUICKEST})]
QUICK = ("the export is not noted", "the second stage is in a step")


def write_pipeline(folder: Path) -> Path:
    """The pipeline with rows of its own, all below a folder."""
    rows = folder / "rows.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{a}+{b}="},
                      {"role": "assistant", "content": str(a + b)}]}
        for a in range(4) for b in range(4)
    ]  # fmt: skip
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE.replace("ROWS", str(rows)))
    return file


def words(folder: Path) -> list[str | Path]:
    """How the pipeline of a folder is called."""
    return [folder / "pipeline.yaml", f"trainer.default_local_dir={folder / 'runs'}"]


def contents(folder: Path) -> dict[str, list[str]]:
    """Everything that must not depend on where a pipeline was killed."""
    runs = folder / "runs"
    stages = [runs / "demo" / name for name in ("sft", "rl")]
    chains = [d.chain for run in stages for d in read_digests(run / "digests.jsonl")]
    registry = ArtifactRegistry(runs)
    noted = [one for one in registry.artifacts if not one.is_retired]
    wrong = [how for one in noted if (how := difference(one)) is not None]
    made = [f"{one.title} from {sorted(one.parents)}" for one in noted if one.used_as is None]
    read = [f"{one.hash} as {one.used_as}" for one in noted if one.used_as is not None]
    # Where rows lie says nothing about what they are; all else is content.
    return {"chains": chains, "made": sorted(made), "read": sorted(read), "wrong": wrong}


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


@pytest.fixture(scope="module")
def whole(pipelines: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_pipeline(folder)
    log = folder / "log.txt"
    assert pipelines.train(*words(folder), log=log) == 0, log.read_text()
    return folder


def killed_and_gone_on(pipelines: Zygote, folder: Path, death: str) -> dict[str, list[str]]:
    write_pipeline(folder)
    log = folder / "log.txt"
    assert pipelines.train(*words(folder), log=log, die=DEATHS[death]) == KILLED, log.read_text()
    assert pipelines.train(*words(folder), log=log) == 0, log.read_text()
    return contents(folder)


@pytest.mark.parametrize("death", QUICK)
def test_a_pipeline_that_was_killed_ends_as_one_that_was_not(
    death: str, pipelines: Zygote, whole: Path, tmp_path: Path
):
    assert killed_and_gone_on(pipelines, tmp_path, death) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("death", sorted(set(DEATHS) - set(QUICK)))
def test_wherever_it_was_killed(death: str, pipelines: Zygote, whole: Path, tmp_path: Path):
    assert killed_and_gone_on(pipelines, tmp_path, death) == contents(whole)


def test_every_artifact_is_as_it_was_noted(whole: Path):
    found = contents(whole)
    assert found["wrong"] == []
    assert sorted(line.partition("@")[0] for line in found["made"]) == [
        "demo/rl",
        "demo/rl/step_000003",
        "demo/sft",
        "demo/sft/step_000001",
        "demo/sft/step_000002",
    ]


def test_an_export_is_traced_to_the_rows_it_began_with(whole: Path):
    registry = ArtifactRegistry(whole / "runs")
    [end] = registry.find("demo/rl")
    above, seen = [end], set[str]()
    while above:
        one = above.pop()
        seen.add(f"{one.kind} {one.name}")
        above += [parent for hash in one.parents if (parent := registry.maker(hash))]
    assert "dataset rows.jsonl" in seen
    assert "model builtin://arithmetic" in seen
    assert "export demo/sft" in seen


def test_a_second_call_skips_what_is_done(pipelines: Zygote, whole: Path, tmp_path: Path):
    before = contents(whole)
    log = tmp_path / "log.txt"
    assert pipelines.train(*words(whole), log=log) == 0
    said = log.read_text()
    assert "stage 1 of 2: sft is done" in said
    assert "stage 2 of 2: rl is done" in said
    assert contents(whole) == before


def refused(pipelines: Zygote, folder: Path, log: Path, *overrides: str) -> str:
    """What a call that must not go on says."""
    assert pipelines.train(*words(folder), *overrides, log=log) == 1
    return log.read_text()


def test_what_a_stage_was_made_from_must_be_as_it_was(
    pipelines: Zygote, whole: Path, tmp_path: Path
):
    rows = whole / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("0+1=", "0+2="))
    try:
        said = refused(pipelines, whole, tmp_path / "rows.txt")
        assert "stage = 'sft': it was begun with something else" in said
        assert "rows.jsonl has other content" in said
    finally:
        rows.write_text(before)
    said = refused(pipelines, whole, tmp_path / "keys.txt", "rl.trainer.seed=4")
    assert "trainer.seed was 3 and is 4" in said
    assert "stage = 'rl'" in said


def test_a_model_that_was_changed_is_not_handed_on(pipelines: Zygote, whole: Path, tmp_path: Path):
    weights = whole / "runs" / "demo" / "sft" / "export" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        said = refused(pipelines, whole, tmp_path / "log.txt")
        assert "model.safetensors has other content" in said
        keys = [f"actor_rollout_ref.model.path={weights.parent}"]
        keys += [f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=other"]
        assert pipelines.train(*keys, log=tmp_path / "plain.txt") == 1
        assert "it is not as it was noted" in (tmp_path / "plain.txt").read_text()
    finally:
        weights.write_bytes(before)


def test_an_artifact_of_another_run_is_named_by_its_hash(
    pipelines: Zygote, whole: Path, tmp_path: Path
):
    [made] = ArtifactRegistry(whole / "runs").find("demo/sft")
    text = (whole / "pipeline.yaml").read_text()
    after = text.index("  - name: rl")
    head = text[: text.index("  - name: sft")] + text[after:]
    (tmp_path / "pipeline.yaml").write_text(head.replace("artifact:sft", f"artifact:{made.title}"))
    runs = [f"trainer.default_local_dir={whole / 'runs'}", "trainer.experiment_name=alone"]
    log = tmp_path / "log.txt"
    assert pipelines.train(tmp_path / "pipeline.yaml", *runs, log=log) == 0, log.read_text()
    [end] = ArtifactRegistry(whole / "runs").find("demo/alone")
    [other] = ArtifactRegistry(whole / "runs").find("demo/rl")
    assert end.hash == other.hash


def further(folder: Path) -> list[str | Path]:
    """A pipeline whose second stage begins where the first one ended, with its optimizer."""
    file = write_pipeline(folder)
    text = file.read_text()
    first = text[text.index("    config:\n      trainer: {stage: sft") : text.index("  - name: rl")]
    words = "{stage: sft, total_training_steps: 5, resume_mode: path, resume_from_path: FROM}"
    second = first.replace("{stage: sft, total_training_steps: 2}", words)
    second = second.replace("FROM", '"artifact:sft/checkpoint"')
    head = text[: text.index("  - name: rl")]
    (folder / "further.yaml").write_text(f"{head}  - name: more\n{second}")
    return [folder / "further.yaml", f"trainer.default_local_dir={folder / 'runs'}"]


def test_a_stage_that_began_from_a_checkpoint_goes_on_from_its_own(
    pipelines: Zygote, tmp_path: Path
):
    called, log = further(tmp_path), tmp_path / "log.txt"
    more = tmp_path / "runs" / "demo" / "more"
    death = ("luyen.checkpoint.store:CheckpointStore._put", "before", 5)
    assert pipelines.train(*called, log=log, die=death) == KILLED, log.read_text()
    kept = more / "checkpoints" / "step_000004"
    made = kept.stat().st_ino
    assert pipelines.train(*called, log=log) == 0, log.read_text()
    assert kept.stat().st_ino == made, "what was done is not done again"
    assert not list(more.glob("checkpoints/left-*"))
    assert [one.step for one in read_digests(more / "digests.jsonl")] == [3, 4, 5]
    source = tmp_path / "runs" / "demo" / "sft" / "checkpoints" / "step_000002"
    for file in (path for path in source.rglob("*") if path.is_file()):
        file.write_bytes(b"")
    said = refused_further(pipelines, called, tmp_path)
    assert "stage = 'more': it was begun with something else: trainer.resume_from_path was" in said


def refused_further(pipelines: Zygote, called: list[str | Path], folder: Path) -> str:
    assert pipelines.train(*called, log=folder / "refused.txt") == 1
    return (folder / "refused.txt").read_text()


@pytest.mark.parametrize("name", [QUICKEST, *LONGER])
def test_a_pipeline_among_the_recipes_runs_in_small(name: str, pipelines: Zygote, tmp_path: Path):
    small = [
        "trainer.total_training_steps=2",
        "trainer.logger=jsonl",
        f"trainer.default_local_dir={tmp_path}",
        "data.train_batch_size=8",
        "data.val_max_samples=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
    ]
    log = tmp_path / "log.txt"
    assert pipelines.train(PIPELINES[name], *small, log=log) == 0, log.read_text()
    assert "Finished: all" in log.read_text()
