"""Configurations of every stage with some keys changed, each a pure function of its number.

A case begins with a tiny run of its stage, switches parts on (`SWITCHES`) and changes one to six
keys, most of them near the parts that are on. Sizes are bounded (`tests.fuzz.values`): at most 8
prompts of 48 tokens and 4 answers of 8 tokens, one layer of width 32, one or two devices.
"""

import random
from dataclasses import dataclass
from typing import final

from tests.fuzz.values import ACTOR, HERE, MODEL, PRODUCTS, ROLLOUT, SUMS, TURNS, WORDS, all_values

_SHAPE = "{num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2,"
COMMON = (
    "data.max_prompt_length=40",
    "data.max_response_length=6",
    "data.train_batch_size=4",
    f"{MODEL}.init=random",
    f"{MODEL}.enable_gradient_checkpointing=false",
    f"{MODEL}.override_config={_SHAPE} num_key_value_heads: 1, head_dim: 16}}",
    f"{ACTOR}.ppo_max_token_len_per_gpu=512",
    "trainer.total_training_steps=4",
    "trainer.logger=jsonl",
)
STAGES: dict[str, tuple[str, ...]] = {
    "rl": (
        f"data.train_files={SUMS}",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ROLLOUT}.n=2",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={HERE / 'shares_reward.py'}",
    ),
    "sft": ("data.train_files=arithmetic://sum?digits=1&size=12&traces=1",),
    "preference": ("data.train_files=arithmetic://sum?digits=1&size=12&pairs=even",),
    "reward_model": ("data.train_files=arithmetic://sum?digits=1&size=12&pairs=even",),
    "distill": (
        "data.train_files=arithmetic://sum?digits=1&size=12&traces=1",
        "distill.teacher_path=builtin://arithmetic",
    ),
}
"""What a tiny run of each stage needs besides."""
_CORRECTION = "algorithm.rollout_correction"
SWITCHES: dict[str, tuple[str, ...]] = {
    f"{MODEL}.lora": (f"{MODEL}.lora_rank=4",),
    f"{MODEL}.quantization": (f"{MODEL}.quantization=nf4", f"{MODEL}.lora_rank=4"),
    f"{ACTOR}.optim.muon": (f"{ACTOR}.optim.name=muon",),
    f"{ACTOR}.optim.8bit": (f"{ACTOR}.optim.name=adamw_8bit",),
    "data.train_mixture": (
        f"data.train_files=['{SUMS}', '{PRODUCTS}']",
        "data.train_weights=[3, 1]",
    ),
    "trainer.early_stopping": (
        "data.val_files=arithmetic://sum?digits=1&split=held-out&size=3",
        "trainer.test_freq=1",
        "trainer.early_stopping.metric=val/accuracy",
    ),
    f"{ACTOR}.kl": (f"{ACTOR}.use_kl_loss=true",),
    "algorithm.kl": ("algorithm.use_kl_in_reward=true",),
    "critic": ("algorithm.adv_estimator=gae",),
    "algorithm.filter_groups": (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
    ),
    _CORRECTION: (f"{_CORRECTION}.rollout_is=token",),
    f"{_CORRECTION}.bypass": (f"{_CORRECTION}.bypass_mode=true",),
    "trainer.stale": ("trainer.max_staleness=1", f"{_CORRECTION}.rollout_is=token"),
    f"{ACTOR}.adaptive_entropy": (f"{ACTOR}.adaptive_entropy.enable=true",),
    f"{ROLLOUT}.val_kwargs": (
        "data.val_files=arithmetic://sum?digits=1&split=held-out&size=3",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
    ),
    "trainer.test": ("data.val_files=arithmetic://sum?digits=1&split=held-out&size=3",),
    "reward.tree": (
        "reward.custom_reward_function.path=null",
        "reward.components={a: {rule: exact}, b: {rule: length, weight: 0.1}}",
    ),
    "reward.routes": ("reward.custom_reward_function.path=null",),
    "reward.overlong_buffer": (
        "reward.reward_manager.name=dapo",
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=2",
    ),
    TURNS: (
        f"{TURNS}.enable=true",
        f"{TURNS}.function_tool_path={HERE / 'chatty_tools.py'}",
        f"trainer.plugins=[{HERE / 'chatty_plugin.py'}]",
        f"{TURNS}.format=chatty",
        "data.max_prompt_length=320",
        f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
    ),
    "distill": ("distill.on_policy=true", "distill.teacher_path=builtin://arithmetic"),
    "preference": ("algorithm.adv_estimator=online_dpo",),
    "preference.labels": (
        "data.train_files=arithmetic://sum?digits=1&size=12&labels=even",
        "preference.loss_type=kto",
    ),
    "reward_training": (
        "data.train_files=arithmetic://sum?digits=1&size=12&steps=1",
        "reward_training.objective=process",
    ),
    f"{ACTOR}.counted": (
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    ),
}
"""Parts that can be switched on, by the block whose keys then matter."""
_BLOCKS = {
    "rl": "algorithm",
    "sft": "sft",
    "preference": "preference",
    "reward_model": "reward_training",
    "distill": "distill",
}
"""Stage -> the block that says most about it."""
_EVERYWHERE = (MODEL, f"{ACTOR}.counted", f"{ACTOR}.optim")
"""Parts that every stage has."""
_ONLINE = ("rl",) * 6 + ("sft", "preference", "reward_model", "distill")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration.

    Example:
        >>> case(3).words == case(3).words
        True
    """

    number: int
    """What everything of it is drawn from."""
    words: tuple[str, ...]
    """The overrides that it consists of; a later one of a key wins."""

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(repr(word) for word in self.words)}"


def case(number: int) -> Case:
    """The configuration of a number."""
    draw = random.Random(number)
    stage = draw.choice(_ONLINE)
    words = [*COMMON, *STAGES[stage], f"trainer.stage={stage}"]
    near = ["", _BLOCKS[stage]]
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        block = draw.choice(list(SWITCHES))
        if stage == "rl" or block.startswith((*_EVERYWHERE, near[1])):
            words += SWITCHES[block]
            near += [block.rpartition(".")[0] or block] * 2
    values = all_values()
    for _ in range(draw.randint(1, 6)):
        above = draw.choice(near)
        keys = [key for key in values if key.startswith(above) and values[key]]
        named = [key for key in keys if key in WORDS]
        path = draw.choice(named if named and draw.random() < _NAMED else keys)
        value = draw.choice(values[path])
        if stage == "rl" and path in _DEVICES:
            value = 1
        words.append(f"{path}={value}")
    if "algorithm.filter_groups.enable=true" in words:
        words.append(_DIFFERING)
    return Case(number=number, words=tuple(words))


_DIFFERING = f"reward.custom_reward_function.path={HERE / 'shares_reward.py'}"
"""Groups that must differ in reward have one in which answers of a random model do."""
_NAMED = 0.4
"""Share of changes to keys whose values have names: most of what can go wrong is there."""
_DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")
"""Several devices take several processes: online cases have one."""
