"""Recorded rollouts judged by another reward."""
