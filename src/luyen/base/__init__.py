"""Layer 1: errors, registries and the vocabulary every other package shares."""
