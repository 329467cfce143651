"""Layer 4: the mathematics. Pure functions over packed tokens; no config object, no logging."""
