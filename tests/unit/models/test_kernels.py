"""A model or a run that names a repository for its attention has none of its code fetched."""

import pytest

from luyen.base.errors import UserError
from luyen.config.model_folder.config_json import size_faults
from luyen.config.schema.model import ModelConfig
from luyen.models.load import model_directory, read_config

ARITHMETIC = "builtin://arithmetic"
NAMED = "code of that repository would be fetched and run"


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_override_is_refused_when_it_is_loaded(key: str):
    model = ModelConfig(path=ARITHMETIC, override_config={key: "org/kernel"})
    with pytest.raises(UserError, match=NAMED):
        read_config(model, model_directory(ARITHMETIC))


@pytest.mark.parametrize(
    "config",
    [
        {"_attn_implementation": "org/kernel@main:flash"},
        {"text_config": {"_experts_implementation": "org/kernel"}},
        {"attn_implementation": {"text_config": "paged|org/kernel"}},
    ],
)
def test_a_file_is_refused_without_torch(config: dict[str, object]):
    assert [NAMED in fault.why for fault in size_faults(config)] == [True]


def test_plain_names_are_taken():
    assert not list(size_faults({"_attn_implementation": "sdpa"}))
