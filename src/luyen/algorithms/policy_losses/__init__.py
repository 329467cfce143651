"""Policy losses: a ratio, a surrogate and a correction, composed and named."""
