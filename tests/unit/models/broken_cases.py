"""The table of broken model folders: what is done to the folder, and the words of the error."""

import os

import torch

from tests.unit.models.broken_folders import (
    NORM,
    UP,
    WEIGHTS,
    Break,
    binary,
    config,
    cut,
    edited,
    filled,
    header,
    layer,
    mapped,
    padded,
    pickle_bomb,
    pickled,
    put,
    removed,
    replaced,
    sharded,
    short_offsets,
    template,
    tensors,
    text,
    twice,
    unknown_tensor,
    untied,
    without,
)

Case = tuple[Break, str]
C, T, TC, G = "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SIZE = "a whole number > 0 is due"
CONFIGS: dict[str, Case] = {
    "config is a list": (text(C, "[]"), "config.json: it holds a list where"),
    "config is null": (text(C, "null"), "config.json: it holds null where"),
    "config is empty": (text(C, " "), "config.json: it is empty"),
    "config is no JSON": (text(C, "{"), "config.json: it is no JSON"),
    "config is deep": (text(C, "[" * 100_000), "config.json: it is nested too deeply"),
    "config is binary": (replaced(C, lambda p: p.write_bytes(b"\xff\xfe")), "it is no UTF-8"),
    "config is missing": (replaced(C, lambda p: None), "config.json: it is not there"),
    "config is a FIFO": (replaced(C, os.mkfifo), "config.json: it is a FIFO"),
    "config is a folder": (replaced(C, os.mkdir), "config.json: it is a folder"),
    "config is a device": (
        replaced(C, lambda p: p.symlink_to("/dev/zero")),
        "config.json: it is a device",
    ),
    "config is a dead link": (
        replaced(C, lambda p: p.symlink_to("nowhere")),
        "config.json: it is a link to a file that is not there",
    ),
    "config is a link to itself": (
        replaced(C, lambda p: p.symlink_to(C)),
        "config.json: it cannot be read",
    ),
    "hidden_size is text": (config(hidden_size="abc"), f'hidden_size is "abc"; {SIZE}'),
    "hidden_size is a fraction": (config(hidden_size=1.5), f"hidden_size is 1.5; {SIZE}"),
    "hidden_size is enormous": (config(hidden_size=10**12), SIZE),
    "no heads": (config(num_attention_heads=0), f"num_attention_heads is 0; {SIZE}"),
    "no layers": (config(num_hidden_layers=0), f"num_hidden_layers is 0; {SIZE}"),
    "layers below 0": (config(num_hidden_layers=-1), f"num_hidden_layers is -1; {SIZE}"),
    "layers are null": (config(num_hidden_layers=None), f"num_hidden_layers is null; {SIZE}"),
    "layers are true": (config(num_hidden_layers=True), f"num_hidden_layers is true; {SIZE}"),
    "labels without end": (config(num_labels=10**30), "at most 100,000 are known"),
    "layers without end": (config(num_hidden_layers=10**8), "at most 10,000 are known"),
    "no vocabulary": (config(vocab_size=0), f"vocab_size is 0; {SIZE}"),
    "no positions": (config(max_position_embeddings=-5), SIZE),
    "heads in no groups": (config(num_key_value_heads=3), "is no multiple of num_key_value"),
    "heads of no width": (
        config(num_attention_heads=6, num_key_value_heads=6, head_dim=...),
        "hidden_size 128 is no multiple of num_attention_heads 6",
    ),
    "rope is a list": (config(rope_parameters=[1]), "rope_parameters is a list, not an object"),
    "rope is text": (config(rope_scaling="yarn"), 'rope_scaling is "yarn", not an object'),
    "theta is 0": (config(rope_theta=0), "rope_theta is 0; a number > 0 is due"),
    "epsilon is text": (config(rms_norm_eps="x"), 'rms_norm_eps is "x"; a number > 0'),
    "activation is a number": (config(hidden_act=3), "hidden_act is 3, not a name"),
    "dtype is nonsense": (config(torch_dtype="foo"), 'torch_dtype is "foo", which is no type'),
    "dtype is int8": (config(torch_dtype="int8"), 'torch_dtype is "int8", which is no type'),
    "model_type is a number": (config(model_type=3), "model_type is 3, not a name"),
    "tied is text": (config(tie_word_embeddings="yes"), 'tie_word_embeddings is "yes"; true or'),
    "an adapter beside it": (text("adapter_config.json", "{}"), "the folder also holds an adapter"),
}
TOKENIZERS: dict[str, Case] = {
    "tokenizer is an object without anything": (text(T, "{}"), "tokenizer.json: its model is null"),
    "tokenizer is a list": (text(T, "[]"), "tokenizer.json: it holds a list where"),
    "tokenizer is cut off": (text(T, '{"model": {"type'), "tokenizer.json: it is no JSON"),
    "tokenizer of no kind": (edited(T, model={"type": "Magic"}), 'its model is of type "Magic"'),
    "tokenizer without a vocabulary": (edited(T, model={"type": "BPE"}), "vocabulary is null"),
    "a token with no id": (
        edited(T, model={"type": "WordLevel", "vocab": {"a": "x"}}),
        'it gives a token the id "x"',
    ),
    "added tokens are text": (edited(T, added_tokens="x"), 'added_tokens are "x", not a list'),
    "tokenizer is missing": (
        removed(T, TC),
        "tokenizer.json: it is not there",
    ),
    "tokenizer is a FIFO": (replaced(T, os.mkfifo), "tokenizer.json: it is a FIFO"),
    "tokenizer config is a list": (text(TC, "[]"), "tokenizer_config.json: it holds a list where"),
    "tokenizer config is no JSON": (text(TC, "nope"), "tokenizer_config.json: it is no JSON"),
    "end of text is a number": (edited(TC, eos_token=3), "eos_token is 3, not a token"),
    "class is a number": (edited(TC, tokenizer_class=3), "tokenizer_class is 3, not a name"),
    "special tokens are nonsense": (
        text("special_tokens_map.json", '{"eos_token": [1]}'),
        "special_tokens_map.json: eos_token is a list, not a token",
    ),
    "special tokens are a list": (
        text("special_tokens_map.json", "[]"),
        "special_tokens_map.json: it holds a list",
    ),
    "tokenizer of a larger model": (
        config(vocab_size=100),
        r"it makes ids up to 127, and the model has 100 rows|\[128, 128\], and \[100, 128\]",
    ),
    "generation config is no JSON": (text(G, "{"), "generation_config.json: it is no JSON"),
    "generation config is a list": (text(G, "[]"), "generation_config.json: it holds a list"),
    "ends are text": (edited(G, eos_token_id="x"), 'eos_token_id is "x"; an id'),
    "ends hold text": (edited(G, eos_token_id=[3, "x"]), 'eos_token_id is "x"; an id'),
    "ends below 0": (edited(G, eos_token_id=-1), "eos_token_id is -1; an id"),
    "ends out of range": (edited(G, eos_token_id=128), "eos_token_id is 128, and the model has"),
}
TEMPLATES: dict[str, Case] = {
    "divides by 0": (template("{{ 1 / 0 }}"), "ZeroDivisionError"),
    "does not parse": (template("{% for"), "it does not parse: line 1"),
    "is a number": (template(3), "chat_template is 3, not a text"),  # type: ignore[arg-type]
    "lists nonsense": (template([1]), "chat_template lists 1"),  # type: ignore[arg-type]
    "is too long": (template(" " * 1_000_001), "1,000,001 characters, and 1,000,000 are"),
    "writes too much": (
        template("{{ 'abcdefgh' * 3000000 }}"),
        "24,000,000 characters, and 16,000,000 are allowed",
    ),
    "takes all memory": (template("{{ 'a' * 10 ** 10 }}"), "needs more memory"),
    "doubles a text": (
        template("{% set x = 'a' %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}"),
        "needs more memory|does not come to an end within 1 s",
    ),
    "loops for ever": (
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        "does not come to an end within 1 s",
    ),
    "calls itself": (
        template("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
        "RecursionError",
    ),
    "calls itself twice": (
        template(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}"
        ),
        "does not come to an end within 1 s",
    ),
    "escapes": (template("{{ ''.__class__.__mro__ }}"), "SecurityError"),
    "changes the messages": (template("{{ messages.append(1) }}"), "SecurityError"),
    "ignores the messages": (template("hello"), "it ignores the messages"),
    "refuses a question": (template("{{ raise_exception('no') }}"), "render a question: no"),
    "is a FIFO": (replaced("chat_template.jinja", os.mkfifo), "chat_template.jinja: it is a FIFO"),
    "of its own is broken": (
        text("chat_template.jinja", "{{ nothing.at.all }}"),
        "chat_template.jinja: the chat template: it does not render a question: UndefinedError",
    ),
}
FILES: dict[str, Case] = {
    "weights are missing": (replaced(WEIGHTS, lambda p: None), "it is not there"),
    "weights have another name": (
        lambda folder: (folder / WEIGHTS).rename(folder / "w.safetensors") and None,
        r"it is not there; w\.safetensors is not read",
    ),
    "weights are cut off": (cut, r"it is cut off: its tensors take 4,00\d,\d+ bytes"),
    "weights have more": (padded, "4 bytes after its tensors belong to none"),
    "weights are empty": (binary(b""), "it is no safetensors file: 0 bytes"),
    "weights are text": (binary(b"hello, this is no model"), "it is no safetensors file"),
    "weights claim a huge header": (
        binary((1 << 62).to_bytes(8, "little") + b"{}"),
        "a header of 4,611,686,018,427,387,904 claimed",
    ),
    "weights are a FIFO": (replaced(WEIGHTS, os.mkfifo), "model.safetensors: it is a FIFO"),
    "header is a list": (header(lambda page: []), "its header is a list"),
    "header is no JSON": (binary((2).to_bytes(8, "little") + b"{,"), "its header is no JSON"),
    "header is deep": (
        binary((99_999).to_bytes(8, "little") + b"[" * 99_999),
        "its header is no JSON",
    ),
    "a shape below 0": (
        header(lambda page: page[NORM].update(shape=[-1])),
        "its header does not say what model.norm.weight is",
    ),
    "a type of no kind": (
        header(lambda page: page[NORM].update(dtype="F7")),
        'model.norm.weight is of an unknown type, "F7"',
    ),
    "a place of another size": (
        header(short_offsets),
        r"model.norm.weight is F32 \[128\] and has 508 bytes",
    ),
    "an index that is a list": (sharded([]), "index.json: it holds a list where"),
    "an index of nothing": (sharded({"weight_map": []}), "its weight_map is a list"),
    "an index to a file that is not there": (
        mapped("b.safetensors"),
        "b.safetensors, which is not",
    ),
    "an index that leads out": (
        mapped("../../etc/passwd"),
        'is in "../../etc/passwd", which is no name of a file in the folder',
    ),
    "an index to a root": (mapped("/etc/passwd"), 'is in "/etc/passwd", which is no name'),
    "an index to a number": (mapped(3), "is in 3, which is no name of a file"),
    "an index with more": (sharded(unknown_tensor), r"model.more is not in a.safetensors"),
    "a tensor in two files": (twice, r"model.norm.weight is in a.safetensors and in b.safetensors"),
}
WEIGHT_CASES: dict[str, Case] = {
    "more layers than the config": (
        config(num_hidden_layers=2),
        "it holds 5 layers, and num_hidden_layers is 2",
    ),
    "fewer layers than the config": (
        config(num_hidden_layers=6),
        r"9 weights are in no file of the folder: model\.layers\.5\.",
    ),
    "one more layer": (layer(5), "it holds 6 layers, and num_hidden_layers is 5"),
    "a weight is missing": (
        tensors(without(UP)),
        f"1 weight is in no file of the folder: {UP}",
    ),
    "a weight too many": (
        tensors(lambda held: held.update({"model.more": torch.zeros(3)})),
        "1 weight is not in the model of config.json: model.more",
    ),
    "an adapter inside": (
        tensors(lambda held: held.update({f"{UP}.lora_A": torch.zeros(3)})),
        "1 weight is not in the model of config.json",
    ),
    "int8": (put(UP, lambda t: t.to(torch.int8)), f"{UP} holds I8, which would be read as"),
    "uint8": (put(UP, lambda t: t.to(torch.uint8)), f"{UP} holds U8, which would be read as"),
    "bool": (put(UP, lambda t: t > 0), f"{UP} holds BOOL, which would be read as"),
    "float8": (put(UP, lambda t: t.to(torch.float8_e4m3fn)), f"{UP} holds F8_E4M3"),
    "another shape": (
        put(UP, lambda t: t[:7].clone()),
        rf"{UP} is \[7, 128\], and \[384, 128\] by config.json",
    ),
    "another width": (
        config(intermediate_size=96),
        r"gate_proj.weight is \[384, 128\], and \[96, 128\] by config.json \(14 more differ\)",
    ),
    "untied by the config": (
        config(tie_word_embeddings=False),
        "1 weight is in no file of the folder: lm_head.weight",
    ),
}
AT_LOADING: dict[str, Case] = {
    "unknown activation": (config(hidden_act="silo"), "hidden_act `silo` is not known"),
    "unknown architecture": (config(model_type="nonesuch"), "`nonesuch`"),
    "text_config is empty": (config(text_config={}), "cannot be loaded: AttributeError"),
    "no architecture": (config(model_type=..., architectures=...), "cannot be loaded"),
    "unknown rotary embedding": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "rope_type `spiral` is not known",
    ),
    "rotary embedding without its values": (
        config(rope_parameters={"rope_type": "yarn", "factor": "x", "rope_theta": 1e4}),
        "cannot be loaded",
    ),
    "a head of its own under a tied config": (untied, "an output layer of other numbers"),
    "NaN": (
        put(UP, filled(float("nan"), 3)),
        f"weight {UP} holds 3 NaN of 49152 numbers",
    ),
    "NaN in a row that nothing reads": (
        put("model.embed_tokens.weight", lambda t: filled(float("nan"), 1)(t.flip(0)).flip(0)),
        "embed_tokens.weight holds 1 NaN",
    ),
    "infinite": (put(NORM, filled(float("inf"), 2)), "model.norm.weight holds 2 infinite of 128"),
    "a pickle that would run": (pickled(pickle_bomb), "pytorch_model.bin: it holds no weights"),
    "a pickle of a list": (pickled(lambda held: [1]), "pytorch_model.bin: it holds no weights"),
    "a pickle of text": (pickled(lambda held: b"no pickle"), "pytorch_model.bin: it holds no"),
    "pickled int8": (
        pickled(lambda held: {**held, UP: held[UP].to(torch.int8)}),
        f"pytorch_model.bin: {UP} holds torch.int8",
    ),
    "a pickle with one layer more": (
        pickled(lambda held: {**held, "model.layers.5.x": torch.zeros(1)}),
        "pytorch_model.bin: it holds 6 layers",
    ),
    "a pickle that lacks a weight": (
        pickled(lambda held: {n: t for n, t in held.items() if n != UP}),
        f"1 weight is in no file of the folder: {UP}",
    ),
    "remote code": (
        config(auto_map={"AutoConfig": "mine.Config"}, model_type="mine"),
        "cannot be loaded",
    ),
}
IN_BOTH = {**CONFIGS, **TOKENIZERS, **TEMPLATES, **FILES, **WEIGHT_CASES}
"""What `check` finds too, in the same words."""
