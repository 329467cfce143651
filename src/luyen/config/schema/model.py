"""`actor_rollout_ref.model`: weights, adapter, and what saves memory in passes."""

from typing import Any, Literal

from luyen.config.schema.block import Block, Names, block, key


class TiledMlpConfig(Block):
    """Feed-forward layers computed slice by slice over the tokens."""

    enabled: bool = key(
        False,
        "Compute feed-forward layers in slices, and each slice again in the backward pass: the "
        "inner activation exists for one slice at a time.",
    )
    num_shards: int = key(4, "Number of slices.", ge=1)


class ModelConfig(Block):
    """A Hugging Face causal language model, whole or with a LoRA adapter."""

    path: str = key(
        "builtin://arithmetic",
        "Directory, hub id or `builtin://` name of the policy. The default is the small "
        "character-level model that ships with Luyen.",
    )
    tokenizer_path: str | None = key(None, "Directory or hub id of the tokenizer; null: `path`.")
    trust_remote_code: bool = key(False, "Run Python code that comes with the model.")
    override_config: dict[str, Any] = key({}, "Values that replace those of the model's config.")
    init: Literal["pretrained", "random"] = key(
        "pretrained", "random: begin with fresh weights of this architecture, seeded by the run."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Type of the weights in computation; auto: bfloat16 on CUDA, float32 on CPU."
    )
    enable_gradient_checkpointing: bool = key(
        True, "Recompute activations in the backward pass: less memory, about a third more time."
    )
    enable_activation_offload: bool = key(
        False,
        "On a GPU: keep activations in host memory between the passes; with gradient "
        "checkpointing, the inputs of layers.",
    )
    use_remove_padding: bool = key(
        True,
        "Train on packed tokens.",
        only="batches are always packed; there is no padded path to switch to",
    )
    use_fused_kernels: bool = key(
        False,
        "Fuse the output head with the log-probabilities: logits are not kept between the passes, "
        "but computed again. On a GPU this is always so.",
    )
    tiled_mlp: TiledMlpConfig = block(TiledMlpConfig, "Feed-forward layers in slices.")
    quantization: Literal["none", "nf4"] = key(
        "none",
        "nf4: hold the weights below an adapter as 4-bit numbers (QLoRA; extra `quant`); needs "
        "`lora_rank`.",
    )
    double_quantization: bool = key(
        True, "nf4: hold the scales of 4-bit weights as 8-bit numbers too."
    )
    lora_rank: int = key(0, "Rank of the LoRA adapter; 0 trains all weights.", ge=0, le=65_536)
    lora_alpha: float = key(
        16.0, "Scale of the adapter: its output is multiplied by alpha/rank.", gt=0
    )
    use_rslora: bool = key(
        False, "Multiply the adapter's output by alpha/sqrt(rank) instead (rsLoRA)."
    )
    use_dora: bool = key(
        False,
        "Learn the norm of each row of a weight next to its direction, which the adapter changes "
        "(DoRA); slower and larger than LoRA.",
    )
    lora_init: Literal["kaiming", "gaussian"] = key(
        "kaiming",
        "How the first factor of a fresh adapter is sampled: kaiming: uniform, by the number of "
        "inputs; gaussian: normal, standard deviation 1/rank. The second factor is 0.",
    )
    lora_dropout: float = key(
        0.0,
        "Share of the adapter's inputs that are set to 0 in a training pass, the rest scaled up; "
        "not in stage `rl`.",
        ge=0,
        lt=1,
    )
    target_modules: Names = key(
        ("all-linear",), "Modules that get an adapter: names, or `all-linear`."
    )
    lora_adapter_path: str | None = key(None, "Adapter directory to start from.")
