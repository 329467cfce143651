"""Every environment, gathered: importing this module registers them all."""

from luyen.rollout.env import class_env, gym, interaction, user, verifiers_env
from luyen.rollout.env.protocol import envs

__all__ = ["envs"]

MODULES = (class_env, gym, interaction, user, verifiers_env)
