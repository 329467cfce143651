"""Formats in which policies write tool calls."""
