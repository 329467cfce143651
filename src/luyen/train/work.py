"""What the work of a step depends on: a journal is taken up for the very same work only."""

from luyen.base.digests import hash_value
from luyen.config.schema.run import RunConfig
from luyen.config.written import stored
from luyen.runtime.roles import Described
from luyen.telemetry.manifest import Manifest

_ACTS = {"seed", "plugins", "device"}
"""Keys of `trainer` that act on rollouts or rewards; the others act on what follows, or nowhere."""


def weights_print(held: Described) -> str:
    """The weights of every role that learns, as one hash."""
    return hash_value(dict(held.weights()))


def settings_print(config: RunConfig, facts: Manifest) -> str:
    """Everything that rollouts and rewards depend on besides weights: keys, rows and code.

    What becomes of a call that was under way is decided when the run goes on: a changed mind about
    it must not drop the very record that it is about.
    """
    tree = stored(config)
    tree["trainer"] = {name: v for name, v in tree["trainer"].items() if name in _ACTS}
    del tree["actor_rollout_ref"]["rollout"]["multi_turn"]["on_unknown"]
    return hash_value([tree, facts.files, facts.datasets, facts.code, facts.versions])
