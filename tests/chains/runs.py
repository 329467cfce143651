"""The short runs that two trees are compared by: recipes, made small by overrides.

All of them train the models that are built in; each takes a few seconds.
"""

from dataclasses import dataclass
from typing import final

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SUMS = "arithmetic://sum?digits=2&size=64"
FEW = "arithmetic://sum?digits=2&split=held-out&size=16"

SHORT = (
    "trainer.device=cpu",
    "trainer.logger=jsonl",
    "trainer.test_freq=-1",
    "data.val_files=[]",
)
"""No run validates unless it says so."""
GROUPS = (
    *SHORT,
    f"data.train_files={SUMS}",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.optim.lr_warmup_steps=1",
    f"{ROLLOUT}.n=4",
)
"""Eight prompts a step with four samples each, learned from in one optimizer step."""
SINGLES = (
    *SHORT,
    f"data.train_files={SUMS}",
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.optim.lr_warmup_steps=1",
)
"""Sixteen prompts a step with one sample each, learned from in two optimizer steps."""
ROWS = (*SHORT, "data.train_batch_size=8")
"""A stage that learns from given rows."""
PAIRS = "data.train_files=arithmetic://sum?pairs=even&size=64"
TRACES = f"data.train_files={SUMS}&traces=1"


def steps(number: int) -> str:
    """The override for the length of a run."""
    return f"trainer.total_training_steps={number}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that both trees train."""

    name: str
    """Name in the output and on the command line."""
    recipe: str
    """File below `recipes/`."""
    sessions: tuple[tuple[str, ...], ...]
    """Overrides of each `luyen train`, one after the other; the second one resumes."""
    shows: str
    """A metric of what the run is named after."""
    num_steps: int
    """Training steps in the end, of all run directories together."""
    above: float = 0.0
    """The metric must be above this in some step, or the run did not do what it is there for."""
    is_alone: bool = False
    """Whether the two trees train it one after the other: it takes every core by itself."""


def _run(name: str, recipe: str, shows: str, num_steps: int, *words: str) -> Run:
    sessions = ((*words, steps(num_steps)),)
    return Run(name=name, recipe=recipe, sessions=sessions, shows=shows, num_steps=num_steps)


_VALIDATED = (*GROUPS, f"data.val_files={FEW}", "trainer.test_freq=1")
RUNS = (
    _run("quickstart", "quickstart.yaml", "reward/mean", 2, *GROUPS),
    _run(
        "tool calling",
        "tool_calling.yaml",
        "tools/calls_mean",
        2,
        *GROUPS,
        "data.train_files=tools://calculator?size=32",
        "data.train_batch_size=4",
        f"{ACTOR}.ppo_mini_batch_size=4",
    ),
    _run("PPO", "ppo.yaml", "critic/vf_loss", 3, *SINGLES, "trainer.critic_warmup=1"),
    _run("LoRA", "lora_grpo.yaml", "actor/kl_loss", 2, *GROUPS),
    _run("ReMax", "remax.yaml", "reward/mean", 2, *SINGLES),
    Run(
        name="DAPO",
        recipe="dapo.yaml",
        sessions=((*GROUPS, steps(2)),),
        shows="group/generated_batches",
        num_steps=2,
        above=1.0,
    ),
    _run(
        "staleness 1",
        "quickstart.yaml",
        "async/staleness_max",
        3,
        *GROUPS,
        "trainer.max_staleness=1",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    _run("SFT", "builtin_arithmetic.yaml", "sft/nll", 2, *ROWS, TRACES),
    _run("DPO", "dpo.yaml", "preference/loss", 2, *ROWS, PAIRS),
    _run("reward model", "reward_model.yaml", "reward_model/loss", 2, *ROWS, PAIRS),
    _run("distillation", "distill.yaml", "distill/divergence", 2, *ROWS, f"{TRACES}&noise=0.5"),
    Run(
        name="pipeline",
        recipe="pipeline_sft_rl.yaml",
        sessions=(
            (
                *SHORT,
                f"sft.{TRACES}",
                f"rl.data.train_files={SUMS}",
                "data.train_batch_size=8",
                f"{ACTOR}.ppo_mini_batch_size=8",
                f"rl.{ROLLOUT}.n=4",
                steps(2),
            ),
        ),
        shows="sft/nll",
        num_steps=4,
    ),
    _run(
        "KL in reward",
        "grpo.yaml",
        "actor/reward_kl_coef",
        3,
        *GROUPS,
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.use_kl_loss=false",
        "algorithm.use_kl_in_reward=true",
    ),
    Run(
        name="resume",
        recipe="quickstart.yaml",
        sessions=((*_VALIDATED, steps(2)), (*_VALIDATED, steps(4))),
        shows="val/accuracy",
        num_steps=4,
    ),
    Run(
        name="Ray",
        recipe="quickstart.yaml",
        sessions=(
            (*GROUPS, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=2", steps(2)),
        ),
        shows="publish/bytes",
        num_steps=2,
        is_alone=True,
    ),
)
