"""`fsdp_config`: how weights are sharded over devices."""

from luyen.config.schema.block import Block, key


class Fsdp(Block):
    """Sharding of weights, gradients and optimizer state, for training on several devices."""

    fsdp_size: int = key(
        -1, "Devices that hold one copy of the weights together; -1: all of them.", ge=-1
    )
    reshard_after_forward: bool = key(
        True, "Let go of a layer's whole weights between its forward and its backward pass."
    )
    param_offload: bool = key(
        False, "Keep shards of weights and gradients in host memory, with `optimizer_offload`."
    )
    optimizer_offload: bool = key(
        False, "Keep the optimizer in host memory, where it then computes, with `param_offload`."
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Devices that share one sequence.",
        only="sequences stay whole; for long ones raise the token budget or take more devices",
        ge=1,
    )
