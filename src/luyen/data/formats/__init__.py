"""Rows of every offline objective: what they are, which format a file has, how they are read."""
