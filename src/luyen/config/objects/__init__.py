"""Python objects of a run as source text."""
