"""Values of the environment stay references wherever a configuration is written or compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from luyen.base.errors import UserError
from luyen.base.secrets import forget, masked
from luyen.config.check import check
from luyen.config.fields import all_fields
from luyen.config.loader.load import load
from luyen.config.loader.parse import ParseResult, masked_values, parse, stored_values
from luyen.pipeline.policy_loading import read_config
from luyen.telemetry.manifest import collect
from luyen.train.run import generation_config_hash

KWARGS = "reward.custom_reward_function.reward_kwargs"
URL = "http://me:planted-pw@host/v1?api_key=planted-key"


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    forget()
    yield
    forget()


def written(*words: str) -> dict[str, object]:
    return stored_values(parse(load([], words)).config)


def test_every_key_that_takes_text_keeps_its_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED", "planted-value")
    keys = [f"{path}.inner" if info.is_open else path for path, info in all_fields().items()]

    def planted(wanted: list[str]) -> ParseResult:
        return parse(load([], [f"{key}=a-${{oc.env:PLANTED}}" for key in wanted]))

    refused = {problem.field for problem in planted(keys).problems}
    kept = [key for key in keys if key not in refused and key.removesuffix(".inner") not in refused]
    assert len(kept) > 40
    parsed = planted(kept)
    assert parsed.problems == ()
    stored = stored_values(parsed.config)
    assert "planted-value" not in yaml.safe_dump(stored)
    assert "planted-value" not in str(masked_values(parsed.config))
    for key in kept:
        value: Any = stored
        for part in key.split("."):
            value = value[part]
        assert value == "a-${oc.env:PLANTED}", key


def test_a_reference_through_another_key_stays_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED", "planted-value")
    text = yaml.safe_dump(
        written(
            f"{KWARGS}.a=${{oc.env:PLANTED}}",
            f"{KWARGS}.b=x-${{{KWARGS}.a}}",
            f"{KWARGS}.c=[1, '${{oc.env:PLANTED}}']",
            f"{KWARGS}.d=${{oc.env:NOT_SET,fallback}}",
            f"{KWARGS}.e=${{trainer.seed}}",
        )
    )
    assert "planted-value" not in text
    kept = yaml.safe_load(text)["reward"]["custom_reward_function"]["reward_kwargs"]
    assert kept["b"] == f"x-${{{KWARGS}.a}}"
    assert kept["c"] == [1, "${oc.env:PLANTED}"]
    assert kept["d"] == "${oc.env:NOT_SET,fallback}"
    assert kept["e"] == 0, "what is not of the environment is resolved"


def test_numbers_and_words_out_of_a_few_are_written_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEED", "7")
    monkeypatch.setenv("MODE", "disable")
    trainer = written(
        "trainer.seed=${oc.decode:${oc.env:SEED}}", "trainer.resume_mode=${oc.env:MODE}"
    )["trainer"]
    assert isinstance(trainer, dict)
    assert (trainer["seed"], trainer["resume_mode"]) == (7, "disable")


def test_a_file_is_read_again_from_the_environment_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANTED", "planted-one")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(written(f"{KWARGS}.a=${{oc.env:PLANTED}}")))
    monkeypatch.setenv("PLANTED", "planted-two")
    config = read_config([file], [])
    assert config.reward.custom_reward_function.reward_kwargs == {"a": "planted-two"}
    monkeypatch.delenv("PLANTED")
    with pytest.raises(UserError, match=r"'PLANTED' not found.*export PLANTED="):
        read_config([file], [])
    tree = load([file], [], reads_environment=False)
    assert tree.problems == ()
    kwargs = parse(tree).config.reward.custom_reward_function.reward_kwargs
    assert kwargs == {"a": "${oc.env:PLANTED}"}


def test_what_is_compared_does_not_depend_on_the_secret(monkeypatch: pytest.MonkeyPatch):
    facts, prints = collect(seeds={}, datasets={}), set[str]()
    for value in ("planted-one", "planted-two"):
        monkeypatch.setenv("PLANTED", value)
        words = [f"{KWARGS}.a=${{oc.env:PLANTED}}", f"{KWARGS}.b=http://u:{value}@h"]
        prints.add(generation_config_hash(parse(load([], words)).config, facts))
    assert len(prints) == 1


def test_passwords_of_addresses_are_masked_and_their_absence_is_told():
    kwargs = f"{KWARGS}={{base_url: '{URL}', api_key: planted-literal, max_tokens: 5}}"
    config = parse(load([], [kwargs])).config
    kept = stored_values(config)["reward"]["custom_reward_function"]["reward_kwargs"]
    assert kept["base_url"] == "http://***@host/v1?api_key=***"
    assert kept["api_key"] == "planted-literal", "what a run needs again is kept, for its owner"
    assert masked_values(config)["reward"]["custom_reward_function"]["reward_kwargs"] == {
        **kept, "api_key": "***",
    }  # fmt: skip
    report = check([], [f"{KWARGS}.base_url={kept['base_url']}"])
    assert "C020" in [problem.id for problem in report.problems]


def test_a_problem_and_its_message_hold_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED", "planted-value")
    report = check([], ["trainer.nnodes=${oc.env:PLANTED}", f"data.train_filez={URL}"])
    told = str([problem.as_json() for problem in report.problems])
    assert "planted" not in told
    assert masked("planted-value") == "${oc.env:PLANTED}"
