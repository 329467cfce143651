"""The embedded engine for GPUs: paged keys and values, many decode steps without the host."""
