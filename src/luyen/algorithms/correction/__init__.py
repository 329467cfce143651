"""Rollout correction: what to do when the sampler and the trainer disagree about a token."""
