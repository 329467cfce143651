"""Scores: a group of rollouts goes in, one tree of numbers per rollout comes out."""
