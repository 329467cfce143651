"""How much memory a device needs, by model and number of GPUs.

    python examples/sizing.py

prints the table of docs/cookbook/sizing.md. The numbers are those of `luyen check`, which plans
your own run, with your lengths and batches.
"""

from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.memory import plan_memory
from luyen.config.model_folder.config_json import ModelShape

GIB = 1024**3
ROOMY = Machine(cpus=64, ram_bytes=2048 * GIB, gpu_bytes=(1024 * GIB,) * 16)
"""Memory without end, so that nothing is cut to what there is."""
GPUS = (1, 2, 4, 8, 16)
ARR = "actor_rollout_ref"
BASE = (
    "data.train_files=arithmetic://sum",
    "data.max_prompt_length=512",
    "data.max_response_length=1536",
    "data.train_batch_size=128",
    f"{ARR}.actor.ppo_mini_batch_size=128",
    f"{ARR}.actor.ppo_max_token_len_per_gpu=16384",
    f"{ARR}.rollout.n=8",
    f"{ARR}.rollout.free_cache_engine=true",
    "algorithm.adv_estimator=grpo",
)
OFFLOAD = tuple(f"{ARR}.actor.fsdp_config.{name}_offload=true" for name in ("param", "optimizer"))
LORA = (f"{ARR}.model.lora_rank=32",)
WAYS = {"full": (), "full, offload": OFFLOAD, "LoRA": LORA, "LoRA, offload": (*LORA, *OFFLOAD)}
QWEN = {"head_dim": 128, "is_tied": False, "vocab": 152064}
SHAPES = {
    "0.5B": ModelShape(
        **{**QWEN, "head_dim": 64, "is_tied": True, "vocab": 151936},
        layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864,
    ),
    "1.5B": ModelShape(
        **{**QWEN, "is_tied": True, "vocab": 151936},
        layers=28, hidden=1536, heads=12, kv_heads=2, intermediate=8960,
    ),
    "7B": ModelShape(**QWEN, layers=28, hidden=3584, heads=28, kv_heads=4, intermediate=18944),
    "32B": ModelShape(**QWEN, layers=64, hidden=5120, heads=40, kv_heads=8, intermediate=27648),
    "70B": ModelShape(
        **{**QWEN, "vocab": 128256},
        layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672,
    ),
}  # fmt: skip
"""Qwen2.5 up to 32B, Llama 3 at 70B."""


def peak(shape: ModelShape, gpus: int, way: str) -> float:
    """GiB of a device that trains and draws, at its largest moment, pages of the cache apart."""
    nodes, each = -(-gpus // 8), min(gpus, 8)
    words = (*BASE, *WAYS[way], f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={each}")
    report = check([], words, machine=ROOMY)
    plan = report.plan
    memory = plan_memory(report.config, shape, plan.batch, plan.where, ROOMY)
    return max(phase.total - phase.parts.get("kv cache", 0) for phase in memory.phases) / GIB


def table() -> str:
    """The table in Markdown: GiB by model, way and number of GPUs."""
    head = " | ".join(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)
    lines = [f"| model | way | copy | {head} |", "|---" * (3 + len(GPUS)) + "|"]
    for name, shape in SHAPES.items():
        for way in WAYS:
            cells = [f"{peak(shape, gpus, way):.0f}" for gpus in GPUS]
            copy = f"{shape.parameters() * 2 / GIB:.0f}"
            lines.append(f"| {name} | {way} | {copy} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
