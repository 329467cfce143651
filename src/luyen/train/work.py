"""What the work of a step depends on: a journal is taken up for the very same work only."""

from collections.abc import Mapping
from typing import Any

from luyen.base.digests import hash_value
from luyen.config.schema.run import RunConfig
from luyen.models.digest import describe
from luyen.runtime.local import LocalRoles
from luyen.train.digests import learned

_ACTS = {"seed", "plugins", "device"}
"""Keys of `trainer` that act on rollouts or rewards; the others act on what follows, or nowhere."""


def weights_print(roles: LocalRoles) -> str:
    """The weights of every role that learns, as one hash."""
    return hash_value(describe(learned(roles.state_dict())[1]))


def settings_print(config: RunConfig, files: Mapping[str, Any]) -> str:
    """Everything configured that rollouts and rewards depend on, files of code included."""
    tree = config.model_dump(mode="json")
    tree["trainer"] = {name: v for name, v in tree["trainer"].items() if name in _ACTS}
    return hash_value([tree, dict(files)])
