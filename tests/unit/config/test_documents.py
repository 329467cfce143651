"""What is explained, documented and exported comes from the models and stays in step."""

from pathlib import Path

import jsonschema
import pytest

from luyen.base.errors import UserError
from luyen.config.catalog import ADV_ESTIMATORS, POLICY_LOSSES
from luyen.config.explain import config_page, explain, json_schema
from luyen.config.fields import all_blocks, walk
from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.plan import estimator_kwargs, loss_kwargs
from luyen.config.rules.all import RULES
from luyen.config.schema.run import RunConfig

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == config_page(), "run `make docs`"


def test_every_key_and_block_has_a_meaning() -> None:
    assert [f.path for f in walk() if not f.doc.endswith(".")] == []
    assert [path for path, doc in all_blocks().items() if not doc.endswith(".")] == []


@pytest.mark.parametrize("path", [f.path for f in walk()])
def test_every_key_can_be_explained(path: str) -> None:
    text = explain(path)
    assert text.startswith(path)
    assert "type" in text
    assert "default" in text


def test_explaining_takes_short_names_rules_and_verl_keys() -> None:
    assert "KV cache" in explain("rollout.gpu_memory_utilization")
    assert explain("multi_turn").startswith("actor_rollout_ref.rollout.multi_turn")
    assert RULES["A02"].doc in explain("a02")
    assert "C005" in explain("C005")
    assert "optim.clip_grad" in explain("actor_rollout_ref.actor.grad_clip")
    assert "accepted at True" in explain("actor_rollout_ref.hybrid_engine")


def test_explaining_an_unknown_key_offers_near_ones() -> None:
    with pytest.raises(UserError, match=r"actor_rollout_ref\.rollout\.max_num_seqs"):
        explain("rollout.max_num_seq")


def test_the_json_schema_accepts_what_check_accepts_and_refuses_what_it_refuses() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"trainer": {"nnodes": 2, "logger": ["console"]}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"trainer": {"nnodez": 2}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"trainer": {"nnodes": 0}}, schema)


def test_a_list_of_one_may_be_written_without_brackets_in_an_editor_too() -> None:
    jsonschema.validate({"data": {"train_files": "rows.parquet"}}, json_schema())


def test_the_configuration_survives_a_round_trip_through_plain_data() -> None:
    words = ["trainer.logger=[console]", "actor_rollout_ref.actor.optim.betas=[0.9, 0.95]"]
    config = parse(load([], words)).config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_knobs_reach_the_algorithm_under_their_own_names() -> None:
    words = [
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        "actor_rollout_ref.actor.clip_ratio_high=0.3",
        "actor_rollout_ref.actor.policy_loss.ratio_cap=5.0",
    ]
    config = parse(load([], words)).config
    gae = estimator_kwargs(config, ADV_ESTIMATORS["gae"])
    assert gae == {"gamma": 0.9, "lam": 0.8, "whiten_advantages": True}
    vanilla = loss_kwargs(config, POLICY_LOSSES["vanilla"])
    assert vanilla == {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": 0.3,
        "ratio_cap": 5.0,
    }
