"""Runs that are killed at chosen points, and go on."""
