"""The one safety bound of the correction."""

LOG_LIMIT = 20.0
"""Log-ratios are cut at ±20 before `exp`, so no weight overflows (verl's safety bound)."""
