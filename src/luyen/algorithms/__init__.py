"""Layer 4: the mathematics. Pure functions over packed tokens; no config, no logging, no devices."""
