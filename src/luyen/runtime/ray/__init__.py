"""Roles on a Ray cluster; `luyen.runtime.ray.cluster` connects, and loads ray only then."""
