"""The training engine on megatron-core: the only door to that library."""
