"""Names of model configurations, which a check knows without transformers, are its own."""

import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from luyen.config.check import check
from luyen.config.model_folder.config_json import ACCEPTED, NAMES

OVERRIDE = "actor_rollout_ref.model.override_config"


@pytest.mark.parametrize("kind", NAMES)
def test_a_known_kind_of_model_has_exactly_these_values(kind: str) -> None:
    assert sorted(NAMES[kind]) == sorted(f.name for f in dataclasses.fields(CONFIG_MAPPING[kind]))


@pytest.mark.parametrize("kind", NAMES)
def test_other_names_are_read_into_these(kind: str) -> None:
    values = {"rope_scaling": {"rope_type": "default"}, "torch_dtype": "float32", "num_labels": 3}
    for name in ACCEPTED:
        given = {name: values.get(name, True)}
        _, unknown = CONFIG_MAPPING[kind].from_dict({}, return_unused_kwargs=True, **given)
        assert not unknown.keys() & given.keys()


def refused(value: str) -> list[str]:
    words = ["data.train_files=arithmetic://sum", f"{OVERRIDE}={value}"]
    found = check([], words).problems
    return [p.field for p in found if p.severity == "error"]


@pytest.mark.parametrize(
    "value",
    ["{no_such: 1}", "{hidden_size: wide}", "{num_key_value_heads: 0}", "{hidden_size: 32}"],
)
def test_values_that_the_built_in_model_cannot_have_are_refused(value: str) -> None:
    assert refused(value) == [OVERRIDE]


def test_fewer_layers_are_a_smaller_model() -> None:
    assert refused("{num_hidden_layers: 2}") == []
