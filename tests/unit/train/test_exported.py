"""An export is whole, noted, and holds the very weights of the checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from luyen.base.errors import UserError
from luyen.checkpoint.tensors import load_state
from luyen.config.check import check
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import load_tokenizer
from luyen.models.reward_model import load_reward_model
from luyen.models.weights import trained_parameters
from luyen.pipeline.export import export_checkpoint, pad_token
from luyen.telemetry.artifact_registry import ArtifactRegistry
from luyen.train.start import run_training
from tests.character_tokenizer import build_character_tokenizer
from tests.runs import MODEL, SHAPE, train
from tests.tiny_models import padded_scores

FIELD = "reward.reward_model.model_path"


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a reward model that learned for two steps."""
    folder = tmp_path_factory.mktemp("judged")
    rows = folder / "pairs.jsonl"
    lines = [
        {
            "prompt": turn("user", f"{a}+{a}="),
            "chosen": turn("assistant", str(2 * a)),
            "rejected": turn("assistant", str(2 * a + 1)),
        }
        for a in range(9)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "trainer.stage=reward_model",
        "trainer.total_training_steps=2",
        "trainer.logger=jsonl",
        f"trainer.default_local_dir={folder / 'runs'}",
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{MODEL}.init=random",
        f"{MODEL}.path=builtin://arithmetic",
        f"{MODEL}.override_config={SHAPE} num_key_value_heads: 1, head_dim: 16}}",
    ]
    run_training(check([], words))
    return folder / "runs" / "luyen" / "run"


def test_a_reward_model_is_exported_as_one_and_can_be_used_at_once(judged: Path, tmp_path: Path):
    made = export_checkpoint(str(judged), tmp_path / "scorer", merge=False)
    assert made.what == "a reward model"
    model = load_reward_model(ModelConfig(path=str(tmp_path / "scorer")), device="cpu", field=FIELD)
    saved = load_state(judged / "checkpoints" / "step_000002", "actor")
    held = trained_parameters(model)
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[name], saved[name]) for name in saved)
    [noted] = ArtifactRegistry(judged.parent.parent).find("luyen/run")
    assert (noted.kind, noted.path) == ("reward_model", str(tmp_path / "scorer"))


def test_transformers_gives_a_padded_batch_the_scores_of_single_conversations(
    judged: Path, tmp_path: Path
):
    export_checkpoint(str(judged), tmp_path / "scorer", merge=None)
    talks = [turn("user", f"{a}+{a}=") + turn("assistant", str(2 * a)) for a in (1, 60, 5000)]
    alone, together = padded_scores(tmp_path / "scorer", talks)
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("end", "pad", "wanted"),
    [
        ("<|im_end|>\\n", "<|endoftext|>", 1),
        ("<|im_end|>\\n", "<|im_end|>", 3),
        ("<|im_end|>", "<|im_end|>", None),
        ("<|im_end|>", "<|endoftext|>", 1),
        ("", "<|endoftext|>", None),
    ],
)
def test_a_padding_token_never_ends_an_answer(
    end: str, pad: str, wanted: int | None, tmp_path: Path
):
    said = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + 'END' }}"
    build_character_tokenizer(tmp_path, chat_template=said.replace("END", end) + "{% endfor %}")
    file = tmp_path / "tokenizer_config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "pad_token": pad}))
    assert pad_token(load_tokenizer(str(tmp_path)), None) == wanted


def test_a_reward_model_has_nothing_to_merge(judged: Path, tmp_path: Path):
    with pytest.raises(UserError, match="the reward model has no adapter"):
        export_checkpoint(str(judged), tmp_path / "scorer", merge=True)
    assert not (tmp_path / "scorer").exists()


def test_an_adapter_is_merged_when_nobody_says_otherwise(tmp_path: Path):
    export_checkpoint(str(train(tmp_path / "base").root), tmp_path / "model", merge=None)
    words = (f"{MODEL}.path={tmp_path / 'model'}", f"{MODEL}.init=pretrained")
    ran = train(tmp_path / "more", *words, f"{MODEL}.lora_rank=2")
    assert "merged" in export_checkpoint(str(ran.root), tmp_path / "whole", merge=None).what
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    alone = export_checkpoint(str(ran.root), tmp_path / "adapter", merge=False)
    assert alone.what.startswith("an adapter for")


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = train(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("luyen.pipeline.export.export_tokenizer", fail)
    with pytest.raises(UserError, match="No space"):
        export_checkpoint(str(ran.root), tmp_path / "whole", merge=None)
    assert {path.name for path in tmp_path.iterdir()} == {"luyen", "artifacts.jsonl"}
