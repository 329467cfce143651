"""Roles on a Ray cluster. `luyen.runtime.ray.cluster` connects; nothing here loads ray before it.

Ray itself is imported by `cluster`, `placement`, `start` and `publish` only.
"""
