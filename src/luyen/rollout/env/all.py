"""Every environment, gathered: importing this module registers them all."""

from luyen.rollout.env import user
from luyen.rollout.env.protocol import envs

__all__ = ["envs"]

MODULES = (user,)
