"""Environments: what a conversation happens in."""
