"""What is trained by one process and by ranks, and the batches that were recorded for it."""

from dataclasses import dataclass, field

import torch

from luyen.algorithms.objective import Objective
from luyen.algorithms.policy_losses import policy_losses
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.batch import MicroBatching, PackedBatch, pack

STEPS, FEW = 20, 6
OPTIM = OptimConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.01)
GRPO = Objective(loss="vanilla", kl_loss_coef=0.05, aggregation="seq-mean-token-mean")
PPO = Objective(loss="vanilla", entropy_coeff=0.01)
HPARAMS = {"dro": {"dro_beta": 0.1}}
"""Hyperparameters without a default."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    objective: Objective
    passes: MicroBatching = field(default_factory=lambda: MicroBatching(max_tokens=64))
    has_critic: bool = False
    lora_rank: int = 0
    is_tied: bool = False
    is_checkpointed: bool = False
    dtype: torch.dtype = torch.float32
    fsdp_size: int = -1
    """Ranks of one copy; in a world of four the other two hold a second one."""
    sequence_ranks: int = 1
    """Ranks that share every pass, if the world has so many."""
    cpu_offload: bool = False
    reshards: bool = True
    kind: str = "llama"
    steps: int = STEPS
    sequences: int | None = None
    """Sequences of a step, where most ranks are to be idle."""
    saved_at: int | None = None
    """Steps before a checkpoint, from which other worlds go on."""


ALONE, COUNTED = MicroBatching(sequences=1), MicroBatching(sequences=2)
SUITES: dict[str, dict[str, Case]] = {
    "quick": {
        "grpo": Case(objective=GRPO, is_tied=True, steps=FEW),
        "grpo, lora, counted": Case(objective=GRPO, lora_rank=4, passes=COUNTED, steps=FEW),
        "ppo": Case(objective=PPO, has_critic=True, saved_at=17),
        "ppo, lora, counted": Case(
            objective=PPO, has_critic=True, lora_rank=4, passes=COUNTED, steps=FEW
        ),
        "chooses over the step": Case(objective=Objective(loss="kl_cov"), steps=2),
        "bf16": Case(
            objective=GRPO, dtype=torch.bfloat16, has_critic=True, passes=ALONE, steps=3, saved_at=1
        ),
        "idle ranks": Case(objective=PPO, has_critic=True, sequences=1, steps=2),
        "replicas": Case(objective=PPO, has_critic=True, fsdp_size=2, steps=4, saved_at=2),
        "recomputed": Case(objective=GRPO, is_checkpointed=True, reshards=False, steps=2),
        "offloaded": Case(objective=GRPO, cpu_offload=True, steps=2),
    },
    "sequences": {
        "ppo": Case(objective=PPO, has_critic=True, sequence_ranks=2, steps=3),
        "more ranks than key heads": Case(
            objective=GRPO,
            sequence_ranks=4,
            is_tied=True,
            is_checkpointed=True,
            steps=3,
            saved_at=1,
        ),
        "lora, loss of whole sequences": Case(
            objective=Objective(loss="gspo"), lora_rank=4, sequence_ranks=4, steps=2
        ),
        "windows and soft caps, counted": Case(
            objective=GRPO, kind="gemma2", passes=COUNTED, sequence_ranks=4, steps=2
        ),
        "one sequence, bf16, replicas": Case(
            objective=GRPO,
            dtype=torch.bfloat16,
            sequence_ranks=2,
            sequences=1,
            fsdp_size=2,
            steps=2,
        ),
    },
    "long": {
        "grpo": Case(objective=GRPO, is_tied=True),
        "grpo, lora, counted": Case(objective=GRPO, lora_rank=4, passes=COUNTED),
        "ppo, lora, counted": Case(objective=PPO, has_critic=True, lora_rank=4, passes=COUNTED),
    },
    "matrix": {
        f"{name}, {kind}, {rank}, {passes}": Case(
            objective=objective,
            has_critic=name == "ppo",
            kind=kind,
            lora_rank=rank,
            passes=passes,
            is_checkpointed=rank == 0,
        )
        for name, objective in (("grpo", GRPO), ("ppo", PPO))
        for kind in ("qwen3", "gemma2")
        for rank in (0, 4)
        for passes in (ALONE, MicroBatching(sequences=3), MicroBatching(max_tokens=45))
    },
    "losses": {
        loss: Case(objective=Objective(loss=loss, hparams=HPARAMS.get(loss, {})), steps=1)
        for loss in policy_losses
    },
    "replicated": {
        f"{name}, {rank}": Case(
            objective=objective, has_critic=name == "ppo", lora_rank=rank, fsdp_size=2
        )
        for name, objective in (("grpo", GRPO), ("ppo", PPO))
        for rank in (0, 4)
    },
}


def recorded(step: int) -> PackedBatch:
    """Some 9 sequences of 3 groups, other ones at every step, with what a step does not compute."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 42, (8 + step % 3,), generator=generator).tolist()
    lengths = [5, *lengths]
    sequences = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    groups = [min(2, i // 3) for i in range(len(lengths))]
    heads = {g: sequences[groups.index(g)][:3] for g in set(groups)}
    sequences = [heads[g] + s[3:] for g, s in zip(groups, sequences, strict=True)]
    masks = [[int(i >= 3 and i % 7 != 5) for i in range(n)] for n in lengths]
    batch = pack(sequences, masks=masks, groups=groups)
    shape = batch.tokens.shape
    advantages, returns = (torch.randn(shape, generator=generator) for _ in range(2))
    return batch.with_streams(advantages=advantages, returns=returns)
