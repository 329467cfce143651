"""Broken model folders: each is refused with a file, a reason and a fix."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.model_folder import chat_template
from luyen.config.model_folder.files import folder_of
from luyen.config.schema.model import ModelConfig
from luyen.data.tokenizer import load_tokenizer
from luyen.models.load import load_policy
from luyen.models.policy import Policy
from luyen.models.reward_model import load_reward_model
from luyen.pipeline.policy_loading import open_checkpoint
from tests.unit.models.broken_cases import AT_LOADING, IN_BOTH
from tests.unit.models.broken_folders import WEIGHTS, Break, edited, linked, removed, tensors

FIELD = "actor_rollout_ref.model.path"
LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
BUILTIN = folder_of("builtin://arithmetic")


@pytest.fixture(scope="module", autouse=True)
def short_patience() -> Iterator[None]:
    """Templates that never end are given up after a second."""
    patch = pytest.MonkeyPatch()
    chat_template._shared.close()
    patch.setattr(chat_template, "CPU_S", 1)
    yield
    patch.undo()
    chat_template._shared.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert BUILTIN is not None
    return shutil.copytree(BUILTIN, tmp_path / "model")


def load(path: Path | str) -> Policy:
    """What a run loads first."""
    tokenizer = load_tokenizer(str(path))
    return load_policy(ModelConfig(path=str(path)), device="cpu", vocabulary=tokenizer.size)


def refused(path: Path | str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(path)
    return caught.value


def reasons(path: Path | str, *more: str) -> list[str]:
    """What `check` says of the model."""
    words = ["data.train_files=arithmetic://sum", f"{FIELD}={path}", *more]
    found = check([], words, machine=LAPTOP).problems
    return [p.why for p in found if p.id in ("M01", "M06")]


def test_there_are_more_than_eighty_cases_and_a_sound_folder_has_no_fault(folder: Path):
    assert len({*IN_BOTH, *AT_LOADING}) == len(IN_BOTH) + len(AT_LOADING) > 100
    assert reasons(folder) == []
    assert load(folder).head.vocabulary == 128


@pytest.mark.parametrize("name", IN_BOTH)
def test_check_and_loading_refuse_in_the_same_words(name: str, folder: Path):
    breaks, words = IN_BOTH[name]
    breaks(folder)
    error = refused(folder)
    assert (error.field, error.value) == (FIELD, str(folder))
    assert re.search(words, error.why), error.why
    assert error.fix
    assert error.why in reasons(folder)


@pytest.mark.parametrize("name", AT_LOADING)
def test_loading_refuses_what_only_it_can_know(name: str, folder: Path):
    breaks, words = AT_LOADING[name]
    breaks(folder)
    assert reasons(folder) == []
    error = refused(folder)
    assert error.field == FIELD
    assert re.search(words, error.why), error.why
    assert error.fix
    assert not Path("/tmp/luyen-was-executed").exists()


def with_tensor(name: str, tensor: torch.Tensor) -> Break:
    return tensors(lambda held: held.update({name: tensor}))


HARMLESS: dict[str, Break] = {
    "rotary": with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16)),
    "vision": with_tensor("visual.blocks.31.norm1.weight", torch.ones(4)),
    "mtp": with_tensor("mtp.layers.0.fc.weight", torch.ones(4)),
    "critic": with_tensor("v_head.summary.weight", torch.ones(1, 128)),
    "mask": with_tensor("model.layers.0.self_attn.bias", torch.ones(4, dtype=torch.bool)),
    "copy": tensors(
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    ),
    "half": tensors(lambda held: held.update({n: t.half() for n, t in held.items()})),
    "no generation config": removed("generation_config.json"),
    "a link": linked,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_checkpoints_hold_besides_is_no_fault(name: str, folder: Path):
    HARMLESS[name](folder)
    assert reasons(folder) == []
    assert load(folder) is not None


def test_layers_that_predict_ahead_are_left_out(folder: Path):
    edited("config.json", num_nextn_predict_layers=1, model_type="llama")(folder)
    with_tensor("model.layers.5.eh_proj.weight", torch.ones(4))(folder)
    assert load(folder) is not None


def test_layers_are_left_out_where_the_run_says_so(folder: Path):
    model = ModelConfig(path=str(folder), override_config={"num_hidden_layers": 2})
    assert load_policy(model, device="cpu", vocabulary=128).model.config.num_hidden_layers == 2


def test_pickled_weights_are_still_read(folder: Path):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert reasons(folder) == []
    assert load(folder) is not None


PATHS = {
    "/etc/passwd": "it is a file, not a folder",
    "/dev/null": "it is a device, not a folder",
    "a\0b": "a zero byte is in it",
    "": "it is empty",
    "x" * 300: "it cannot be looked at: File name too long",
    "/nowhere/at/all": "no such (folder|directory) on this machine",
    "~nobody-here/model": "no such (folder|directory) on this machine",
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_lead_to_no_folder(path: str):
    assert re.search(PATHS[path], refused(path).why)
    with pytest.raises(UserError, match=PATHS[path]):
        load_policy(ModelConfig(path=path), device="cpu", vocabulary=128)


def test_a_fifo_and_an_empty_folder_in_the_place_of_a_model(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    assert refused(tmp_path / "fifo").why == "it is a FIFO, not a folder"
    assert reasons(tmp_path / "fifo") == ["it is a FIFO, not a folder"]
    (tmp_path / "empty").mkdir()
    assert "config.json: it is not there" in reasons(tmp_path / "empty")


def test_a_name_of_the_hub_is_refused_at_once_where_no_hub_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "no Hugging Face hub answers" in refused("org/name").why
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    assert BUILTIN is not None
    shutil.copytree(BUILTIN, cached / "snapshots" / "abc")
    assert load("org/name").head.vocabulary == 128
    (cached / "snapshots" / "abc" / "config.json").write_text("[]")
    assert "config.json: it holds a list" in refused("org/name").why
    assert "config.json: it holds a list" in reasons("org/name")[0]


@pytest.mark.parametrize("key", ["critic.model.path", "actor_rollout_ref.ref.path"])
def test_check_looks_into_every_model_that_a_key_names(key: str, folder: Path):
    edited("config.json", num_hidden_layers=2)(folder)
    words = ["data.train_files=arithmetic://sum", f"{key}={folder}"]
    found = [p for p in check([], words, machine=LAPTOP).problems if p.id == "M06"]
    assert [p.field for p in found] == [key]
    with pytest.raises(UserError, match="it holds 5 layers") as caught:
        load_policy(ModelConfig(), path=str(folder), device="cpu", vocabulary=128, field=key)
    assert caught.value.field == key


def test_reward_models_have_the_same_protection(folder: Path):
    edited("config.json", architectures=["LlamaForSequenceClassification"], num_labels=1)(folder)
    with_tensor("score.weight", torch.full((1, 128), float("nan")))(folder)
    key = "reward.reward_model.model_path"
    with pytest.raises(UserError, match=r"score\.weight holds 128 NaN of 128") as caught:
        load_reward_model(ModelConfig(path=str(folder)), device="cpu", field=key)
    assert caught.value.field == key
    with_tensor("model.layers.9.mlp.up_proj.weight", torch.ones(4))(folder)
    with pytest.raises(UserError, match="it holds 10 layers"):
        load_reward_model(ModelConfig(path=str(folder)), device="cpu", field=key)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda f: (f / "adapter_config.json").write_text("[]"), "it holds a list"),
        (lambda f: (f / "adapter_config.json").write_text('{"r": "x"}'), 'r is "x"'),
        (lambda f: (f / "adapter_config.json").write_text('{"r": 8}'), "r is 8, and the run has"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"no"), "no safetensors file"),
        (
            lambda f: save_file(
                {"a.lora_A.weight": torch.ones(3, 4)}, f / "adapter_model.safetensors"
            ),
            r"a\.lora_A\.weight is \[3, 4\], and the run has lora_rank 4",
        ),
        (
            lambda f: save_file(
                {"a.lora_B.weight": torch.ones(3, 4)}, f / "adapter_model.safetensors"
            ),
            r"71 of its weights do not fit.*: \[3, 4\] in the file, not there in the run",
        ),
    ],
)
def test_broken_adapters_are_refused(breaks: Break, words: str, tmp_path: Path):
    breaks(tmp_path)
    model = ModelConfig(lora_rank=4, lora_adapter_path=str(tmp_path))
    with pytest.raises(UserError, match=words) as caught:
        load_policy(model, device="cpu", vocabulary=128)
    assert caught.value.field == "actor_rollout_ref.model.lora_adapter_path"


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "it holds a list"), ("{}", "it does not say r"), ('{"r": [1]}', "r is a list")],
)
def test_commands_on_an_adapter_refuse_a_broken_config(content: str, words: str, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=rf"adapter_config\.json: {words}"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "/dev/null"])
def test_commands_on_a_path_that_leads_nowhere(path: str):
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert caught.value.fix
