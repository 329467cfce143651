"""Reproducible figures of this machine, with the floor beside them."""
