"""Layer 4: rows to prompts, prompts to tokens, and the order in which prompts are sampled."""
