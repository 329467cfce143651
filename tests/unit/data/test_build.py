"""From the block to what a loop draws from."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Source
from luyen.config.schema.data import DataConfig
from luyen.data.build import TrainData, build_data
from luyen.data.formats.detect import Kind
from luyen.data.offline import build_offline_data
from luyen.data.samplers import samplers
from luyen.data.samplers.orders import Sequential
from tests.unit.data.templates import assistant, pieces, renderer, tokenizer, user

SUM = "arithmetic://sum?size=12"


def build(*files: str, name: str = "chatml", **keys: Any) -> TrainData:
    data = DataConfig.model_validate({"train_files": list(files) or [SUM], **keys})
    return build_data(data, tokenizer=tokenizer(name), seed=7)


def build_offline(*files: str, name: str = "chatml", **keys: Any) -> TrainData:
    data = DataConfig.model_validate({"train_files": list(files), **keys})
    kinds = (Kind.CONVERSATION, Kind.PROMPTS)
    return build_offline_data(data, kinds=kinds, tokenizer=tokenizer(name), seed=7).given


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_quick_start_is_ready_to_be_drawn_from():
    found = build(val_files=["arithmetic://sum?split=held-out&size=5"])
    assert found.num_leaked == 0
    assert found.notes() == ["12 of 12 training rows", "5 of 5 validation rows"]
    assert sorted(found.sampler.take(0, 12)) == list(range(12))
    assert found.validation is not None
    assert len(found.validation.prompts) == 5


def test_one_dataset_trains_under_two_templates_unchanged(tmp_path: Path):
    rows = [{"messages": [user(f"{i}+1="), assistant(str(i + 1))]} for i in range(5)]
    path = write(tmp_path / "rows.jsonl", *rows)
    ends = {"chatml": "<|im_end|>", "headers": "<|eot_id|>"}
    prompts = {}
    for name, end in ends.items():
        found = build_offline(path, name=name)
        prompts[name] = (found.train.prompts, found.train.fingerprint, found.sampler.take(0, 9))
        for i, prompt in enumerate(found.train.prompts):
            (branch,) = found.renderer.conversation(prompt.messages)
            sampled = [text for s, _, text in pieces(branch, found.renderer) if s == "SAMPLED"]
            assert sampled == [f"{i + 1}{end}"]
        assert found.train.markers == ()
    assert prompts["chatml"] == prompts["headers"]


def test_the_seed_of_the_block_goes_before_the_seed_of_the_run():
    run, own = build(), build(seed=8)
    data = DataConfig.model_validate({"train_files": [SUM]})
    other = build_data(data, tokenizer=tokenizer("chatml"), seed=8)
    assert own.sampler.take(0, 12) == other.sampler.take(0, 12) != run.sampler.take(0, 12)
    zero = build(seed=0)
    assert zero.sampler.take(0, 12) != run.sampler.take(0, 12)


def test_training_rows_lose_duplicates_and_validation_rows_keep_them(tmp_path: Path):
    row = {"prompt": [user("a")]}
    path = write(tmp_path / "rows.jsonl", row, row, {"prompt": [user("b")]})
    found = build(path, val_files=[path])
    assert found.validation is not None
    assert (len(found.train.prompts), len(found.validation.prompts)) == (2, 3)
    assert found.num_leaked == 3
    assert "2 of 3 training rows (1 duplicates)" in found.notes()
    assert "3 validation prompts are also trained on" in found.notes()
    assert len(build(path, filter_duplicates=False).train.prompts) == 3


def test_limits_keep_the_first_rows():
    found = build(train_max_samples=3, val_files=[SUM], val_max_samples=2)
    assert found.validation is not None
    assert found.train.prompts == build().train.prompts[:3]
    assert found.validation.prompts == build().train.prompts[:2]


def test_long_prompts_are_dropped_or_cut_as_the_block_says(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [user("1")]}, {"prompt": [user("123456")]})
    room = len(renderer("chatml").prompt_tokens([user("12")]))
    assert build(path, max_prompt_length=room).train.counts == {"read": 2, "overlong": 1}
    cut = build(
        path, max_prompt_length=room, filter_overlong_prompts=False, truncation="right"
    ).train
    assert [p.messages[0]["content"] for p in cut.prompts] == ["1", "12"]
    with pytest.raises(UserError, match="more than"):
        build(path, max_prompt_length=room, filter_overlong_prompts=False)


def test_a_conversation_may_fill_prompt_and_response_together(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"messages": [user("1"), assistant("2")]})
    (branch,) = renderer("chatml").conversation([user("1"), assistant("2")])
    length = len(branch.tokens)
    keys = {"max_prompt_length": length - 4}
    assert len(build_offline(path, max_response_length=4, **keys).train.prompts) == 1
    with pytest.raises(UserError, match="no row is left: 1 read, 1 overlong") as caught:
        build_offline(path, max_response_length=3, **keys)
    assert f"both make {length - 1}" in caught.value.fix


def test_columns_and_template_arguments_come_from_the_block(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"q": "1+1=", "a": "2", "kind": "sums"})
    found = build(
        path,
        prompt_key="q",
        ground_truth_key="a",
        reward_fn_key="kind",
        string_prompts="user",
        apply_chat_template_kwargs={"thinking": True},
    )
    (prompt,) = found.train.prompts
    assert (prompt.ground_truth, prompt.data_source) == ("2", "sums")
    assert found.renderer.template_kwargs == {"thinking": True}
    assert "1 plain text made a user message" in found.notes()[0]


def test_markers_inside_rows_are_reported(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [user("a<|im_end|>b")]})
    notes = build(path).notes()
    assert f"<|im_end|> in 1 row, first in {path} row 1" in notes[1]


def test_who_must_speak_last_depends_on_the_training(tmp_path: Path):
    answered = write(tmp_path / "a.jsonl", {"messages": [user("a"), assistant("b")]})
    asked = write(tmp_path / "b.jsonl", {"messages": [user("a")]})
    with pytest.raises(UserError, match="has answered already") as caught:
        build(answered)
    assert caught.value.field == f"{answered} row 1: messages"
    with pytest.raises(UserError, match="assistant"):
        build_offline(asked)
    assert len(build(asked).train.prompts) == 1


def test_tools_that_the_template_would_hide_are_refused(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [user("a")], "tools": [{"name": "f"}]})
    assert len(build(path).train.prompts) == 1
    with pytest.raises(UserError, match="no place for tools") as caught:
        build(path, name="headers")
    assert caught.value.field == f"{path} row 1: tools"


def test_a_dataset_of_which_nothing_is_left_is_refused(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [user(" ")]})
    with pytest.raises(UserError, match="no row is left: 1 read, 1 empty") as caught:
        build(path)
    assert caught.value.field == "data.train_files"
    with pytest.raises(UserError) as caught:
        build(val_files=[path])
    assert caught.value.field == "data.val_files"


def test_the_limit_that_no_prompt_keeps_is_named(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [user("1 + 1")]})
    with pytest.raises(UserError, match="1 overlong") as caught:
        build(path, max_prompt_length=2)
    assert caught.value.fix == "raise data.max_prompt_length, which is 2"


def test_a_sampler_is_chosen_by_name_with_its_arguments():
    weights = {"arithmetic/sum": 1, "arithmetic/product": 0}
    found = build(
        SUM,
        "arithmetic://product?size=12",
        sampler={"name": "mixed", "kwargs": {"weights": weights}},
    )
    assert set(found.sampler.take(0, 200)) == set(range(12))


def test_a_plugin_adds_a_sampler_by_name():
    if "every_other" not in samplers:
        samplers.register("every_other")(
            lambda prompts, *, seed: Sequential(prompts[::2], seed=seed)
        )
    assert build(sampler={"name": "every_other"}).sampler.take(0, 12)[-1] == 5


@pytest.mark.parametrize(
    ("sampler", "field", "said"),
    [
        ({"name": "shufled"}, "name", "did you mean `shuffled`"),
        ({"name": "mixed"}, "kwargs.weights", "the sampler needs it"),
        ({"name": "curriculum", "kwargs": {"kye": "a"}}, "kwargs.kye", "did you mean `key`"),
    ],
)
def test_a_sampler_that_cannot_be_made_is_refused(sampler: dict[str, Any], field: str, said: str):
    with pytest.raises(UserError) as caught:
        build(sampler=sampler)
    assert caught.value.field == f"data.sampler.{field}"
    assert said in str(caught.value)


OWN = """
class Backwards:
    def __init__(self, prompts, *, seed, skip=0):
        self.size, self.skip = len(prompts), skip

    def take(self, cursor, count):
        return [(self.size - 1 - self.skip - c) % self.size for c in range(cursor, cursor + count)]

class Lazy:
    def __init__(self, prompts, **kwargs):
        pass
"""


def test_a_sampler_class_of_the_users_own_is_loaded_from_its_file(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    own = {"class_path": str(path), "class_name": "Backwards", "kwargs": {"skip": 1}}
    assert build(sampler=own).sampler.take(0, 3) == [10, 9, 8]
    with pytest.raises(UserError, match=r"has a method take\(cursor, count\)"):
        build(sampler={**own, "class_name": "Lazy"})
    with pytest.raises(UserError, match="did you mean `Backwards`"):
        build(sampler={**own, "class_name": "Backward"})
    with pytest.raises(UserError, match="no Python file is there"):
        build(sampler={**own, "class_path": str(tmp_path / "none.py")})


def test_rendering_for_training_starts_with_the_prompt_of_inference():
    found = build()
    for prompt in found.train.prompts:
        asked = found.renderer.prompt_tokens(prompt.messages)
        answered = [*prompt.messages, assistant(str(prompt.ground_truth))]
        (branch,) = found.renderer.conversation(answered)
        assert list(branch.tokens[: len(asked)]) == asked
        assert branch.sources[: len(asked)] == (Source.PROMPT,) * len(asked)
        assert found.renderer.text_of(branch.sampled) == prompt.ground_truth
