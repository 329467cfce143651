"""Samplers: the order of rows. Importing this package registers the built-in ones."""

from luyen.data.samplers import orders
from luyen.data.samplers.protocol import AdaptiveSampler, Sampler, State, samplers

__all__ = ["AdaptiveSampler", "Sampler", "State", "orders", "samplers"]
