"""Layer 4: code that may hang, crash or be hostile, run in processes that are not this one."""
