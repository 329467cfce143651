"""Loading: what is refused, what is switched off, and what is silent."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from luyen.base.errors import UserError
from luyen.config.schema.model import ModelConfig
from luyen.models.load import dtype_of, load_policy
from luyen.models.policy import Policy
from luyen.models.random_policy import random_policy
from luyen.train.builders.python_inputs import PythonObjects
from tests.e2e.tiny import luyen
from tests.tiny_models import tiny_net


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_net(tie_word_embeddings=False, attention_dropout=0.3).save_pretrained(path)
    return path


def load(directory: Path, **options) -> Policy:
    return load_policy(ModelConfig(path=str(directory), **options), device="cpu", vocabulary=61)


def edited(directory: Path, target: Path, **changes) -> Path:
    """A copy of the model with another config."""
    config = json.loads((directory / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return target


def test_loaded_weights_are_those_of_the_file(directory: Path, capfd: pytest.CaptureFixture[str]):
    policy = load(directory)
    saved = load_file(directory / "model.safetensors")
    own = dict(policy.model.named_parameters())
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_file_that_is_overwritten_under_a_run_changes_nothing(tmp_path: Path, is_tied: bool):
    tiny_net(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    policy = load(tmp_path)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:  # in place: a new file of that name would leave the old one
        opened.write(bytes(file.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    net = policy.model
    assert (net.lm_head.weight is net.get_input_embeddings().weight) == is_tied


def test_dropout_is_switched_off_where_it_is_a_whole_number(directory: Path, tmp_path: Path):
    path = edited(directory, tmp_path, attention_dropout=1)
    assert load(path).train().model.config.attention_dropout == 0.0


def test_dropout_is_switched_off(directory: Path):
    assert json.loads((directory / "config.json").read_text())["attention_dropout"] == 0.3
    policy = load(directory).train()
    assert policy.model.config.attention_dropout == 0.0
    tokens, mask = torch.tensor([3, 4, 5]), torch.tensor([False, True, True])
    first, second = (policy(tokens, [3], mask).logp for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_batch_dependent_rope_is_refused(directory: Path, tmp_path: Path, kind: str):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    path = edited(directory, tmp_path, rope_parameters=rope)
    with pytest.raises(UserError, match=f"`{kind}` changes with the longest sequence"):
        load(path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load(tmp_path / "nothing")
    assert caught.value.field == "actor_rollout_ref.model.path"


def test_a_directory_without_weights_is_refused(directory: Path, tmp_path: Path):
    edited(directory, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: it is not there"):
        load(tmp_path)


def test_a_damaged_file_is_refused(directory: Path, tmp_path: Path):
    edited(directory, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: it is cut off"):
        load(tmp_path)


def test_weights_that_are_lacking_are_refused_and_not_made_up(directory: Path, tmp_path: Path):
    edited(directory, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    del saved["model.layers.1.mlp.up_proj.weight"]
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weight is in no file of.*layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(directory: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"gate_proj\.weight is \[96, 64\], and \[128, 64\] by"):
        load(edited(directory, tmp_path, intermediate_size=128))


def test_overrides_are_applied_and_unknown_ones_refused(directory: Path):
    assert load(directory, override_config={"rms_norm_eps": 0.5}).model.config.rms_norm_eps == 0.5
    with pytest.raises(UserError, match="has no `rms_norm_epsilon`") as caught:
        load(directory, override_config={"rms_norm_epsilon": 0.5})
    assert "rms_norm_eps" in caught.value.fix


def test_the_type_of_weights(directory: Path):
    assert load(directory).model.lm_head.weight.dtype == torch.float32
    half = load(directory, dtype="bfloat16")
    assert half.model.lm_head.weight.dtype == torch.bfloat16
    # Rotary frequencies stay in fp32: rounded ones turn far positions by the wrong angle.
    assert {b.dtype for n, b in half.named_buffers() if "inv_freq" in n} == {torch.float32}
    assert dtype_of(ModelConfig(), "cuda") == torch.bfloat16


def test_gradient_checkpointing_changes_no_gradient(directory: Path):
    grads = []
    tokens, mask = torch.arange(3, 20), torch.arange(17) > 4
    for enabled in (False, True):
        policy = load(directory, enable_gradient_checkpointing=enabled).train()
        policy(
            tokens, [9, 8], mask.clone().index_fill(0, torch.tensor([9]), False)
        ).logp.sum().backward()
        grads.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def refuses(*_: object, **__: object) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_disk_that_is_full_is_the_reason_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", refuses)
    done = luyen("export", "builtin://arithmetic", tmp_path / "out")
    assert isinstance(done.exception, UserError)
    assert "No space left on device" in done.exception.why
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_full_is_the_reason_of_a_model_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    net = random_policy().model
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", refuses)
    with pytest.raises(UserError, match="No space left on device"):
        PythonObjects(model=net, tokenizer="builtin://arithmetic").write(tmp_path / "inputs")
