"""Replay recorded steps from the files of a run."""
