"""Roles on a Ray cluster.

`luyen.runtime.ray.cluster` connects, and loads ray only then. Planning (`pools`) and what the
controller does with replicas (`engines`, `crew`, `routing`) know nothing of ray; modules that start
or place processes do, and are imported after it is known to be there.
"""
