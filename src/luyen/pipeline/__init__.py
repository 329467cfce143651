"""Layer 8: stages one after the other, and the models they hand on."""
