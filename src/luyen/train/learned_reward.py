"""The learned reward of a run, as its rewards ask for it: in this process, or on a cluster."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from luyen.config.plan import reward_pool
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.rewards.learned import Scorer
from luyen.rewards.protocol import Services
from luyen.runtime.reward_model import load_scorer, open_learned_reward
from luyen.runtime.watch import RoleWatch

if TYPE_CHECKING:
    from luyen.runtime.ray.reward_model import RayScorer


def learned_services(
    config: RunConfig,
    policy: Renderer,
    scorer: Scorer | None,
    device: str,
    *,
    say: Callable[[str], None] | None = None,
) -> Services:
    """What rewards are brought: the reward model, where it is on.

    Without a `scorer`, the model is loaded here. Closing the rewards closes it. `say` hears which
    tokens it reads.
    """
    reward_model = config.reward.reward_model
    if not reward_model.enable:
        return Services()
    start: Callable[[], Scorer] = partial(load_scorer, reward_model, device, is_alone=False)
    model = open_learned_reward(reward_model, policy, start if scorer is None else lambda: scorer)
    if say is not None:
        say(f"the reward model reads {model.way}")
    return Services(model=model, closing=model.close)


def ray_scorer(
    config: RunConfig, device: str, places: Sequence[Mapping[str, Any]], watch: RoleWatch
) -> "RayScorer | None":
    """Copies of the reward model in these places of a cluster; None where it is off."""
    reward_model = config.reward.reward_model
    if not reward_model.enable:
        return None
    # Only here is it known that ray is installed.
    from luyen.runtime.ray.reward_model import RayScorer

    is_alone = reward_pool(config) is not None
    make = partial(load_scorer, reward_model, device, is_alone=is_alone)
    return RayScorer(make, places=places, watch=watch)
