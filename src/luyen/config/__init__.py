"""Layer 3: the configuration. Frozen data, every problem found at once, and never torch."""
