"""Toolsets."""
