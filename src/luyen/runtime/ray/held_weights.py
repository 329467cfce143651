"""Weights in an engine: written, and looked at."""

from collections.abc import Collection

from luyen.base.errors import UserError
from luyen.models.digest import describe
from luyen.models.fingerprint import Fingerprint
from luyen.rollout.protocol import RolloutEngine
from luyen.rollout.resident import ResidentEngines
from luyen.runtime.fill import fill
from luyen.runtime.ray.weights import Part, unpack


def load_part(
    engines: ResidentEngines,
    version: int | None,
    keep: Collection[int | None],
    part: Part,
    is_last: bool,
) -> tuple[set[str], dict[str, str] | None]:
    """Names of what was written, and after the last part what the engine holds."""
    engine = engines.engine() if version is None else engines.hold(version, keep=keep)
    print_of = engine.fingerprint()
    if print_of is None:
        why = "the engine cannot say which weights it holds, so none can be given to it"
        fix = "let its `fingerprint` return the policy's parameters"
        raise UserError("actor_rollout_ref.rollout.name", type(engine).__name__, why, fix)
    given = unpack(part)
    fill(print_of.weights, given)
    return set(given), _described(print_of) if is_last else None


def version_digests(engines: ResidentEngines, version: int | None) -> dict[str, str] | None:
    """Digests of a version's weights; None: they are gone, or the engine cannot say."""
    is_gone = version is not None and version not in engines.versions
    return None if is_gone else digests_of(engines.engine(version))


def digests_of(engine: RolloutEngine) -> dict[str, str] | None:
    """Digests of the weights that an engine draws with; None: it cannot say."""
    held: Fingerprint | None = engine.fingerprint()
    return None if held is None else _described(held)


def _described(held: Fingerprint) -> dict[str, str]:
    here = describe({n: w for n, w in held.weights.items() if not isinstance(w, str)})
    return {n: w if isinstance(w, str) else here[n] for n, w in held.weights.items()}
