"""Layer 5: generation. Engines take token ids and give token ids with their log-probabilities."""
