"""How blocks and keys are declared, and defaults that are derived from other keys."""

from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from luyen.config.catalog import ADV_ESTIMATORS, ROLLOUT_ENGINES

MOST_MACHINES = 100_000
"""More than any cluster has; a plan lists them one by one."""
MOST_DEVICES = 1024
"""More than any machine has."""


class Block(BaseModel):
    """A frozen group of keys. Unknown keys and values of another type are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, values: Any) -> Any:
        """Without the nulls at derived keys that have no other use for null."""
        if not isinstance(values, dict):
            return values
        given = cast(dict[str, Any], values)
        nulls = {name for name, value in given.items() if value is None}
        left_open = {name for name in nulls & cls.model_fields.keys() if _is_left_open(cls, name)}
        return {name: value for name, value in given.items() if name not in left_open}


def _is_left_open(block: type[Block], name: str) -> bool:
    declared = block.model_fields[name]
    extra = declared.json_schema_extra
    is_derived = isinstance(extra, dict) and "x-derived" in extra
    return is_derived and type(None) not in get_args(declared.annotation)


def key(
    default: Any,
    doc: str,
    *,
    awaits: str | None = None,
    required: bool = False,
    only: str | None = None,
    derived: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a key: default, meaning and limits.

    `awaits` names the part of Luyen that will read it and is not built yet: until then any other
    value is refused. `only` is the reason why the default is the one value we implement. `derived`
    says which value a key has that is not written (`luyen.config.schema.block` has the rule).
    """
    marks = {
        "x-awaits": awaits,
        "x-required": required or None,
        "x-only": only,
        "x-derived": derived,
    }
    extra = {name: value for name, value in marks.items() if value is not None}
    declare: Any = Field  # limits are pydantic's keyword arguments, passed on as they come
    return declare(default=default, description=doc, json_schema_extra=extra or None, **limits)


def block(kind: type[Block], doc: str) -> Any:
    """Declare a nested block, present with its defaults when the user does not write it."""
    return Field(default_factory=kind, description=doc)


def as_tuple(value: Any) -> Any:
    """A list as a tuple, and one word as a tuple of it; the validator sees to anything else."""
    if isinstance(value, str):
        return (value,)
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


_WORDS = {"type": "array", "items": {"type": "string"}}

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, _WORDS]}),
]
"""One string or a list of strings."""
Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_tuple)]
"""A list of token ids."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(as_tuple)]
"""A list of numbers."""
Steps = Annotated[tuple[int, ...], BeforeValidator(as_tuple)]
"""A list of steps, counted from 1."""
Pair = Annotated[tuple[float, float], BeforeValidator(as_tuple)]
"""A list of two numbers."""


# Derived defaults: values of keys that are not written and follow from other keys.
#
# A key is declared with `derived=` and its rule in words; the code of the rule is here. A value
# that was written, in a file or on the command line, never changes. A stored
# configuration holds the derived values, so that a resumed run keeps them.

GROUP = 8
"""Samples of each prompt where an estimator compares them."""
RATES = {"rl": 1e-6, "sft": 1e-5, "preference": 5e-7, "reward_model": 1e-5, "distill": 1e-5}
"""Stage -> peak learning rate of all weights."""
ADAPTER_FACTOR = 10
"""An adapter learns at so many times the rate of all weights."""
SAVE_LEAST, SAVE_MOST = 10, 50
"""Fewest and most steps between checkpoints."""
KEPT = 2
"""Checkpoints that are kept if `save_freq` is not set."""

LR_WORDS = (
    "by stage: rl 1e-6, sft, reward_model and distill 1e-5, preference 5e-7; ten times that with "
    "an adapter (`model.lora_rank`)"
)
ESTIMATOR_WORDS = "`grpo` where `rollout.n` is above 1 and no key of `critic` is set, else `gae`"
N_WORDS = f"{GROUP} where `algorithm.adv_estimator` compares the samples of a prompt, else 1"
MINI_BATCH_WORDS = "`data.train_batch_size`: one optimizer step on all of it"
SAVE_WORDS = (
    f"a tenth of `total_training_steps`, but {SAVE_LEAST} to {SAVE_MOST}, and -1 in a run of fewer "
    f"than {SAVE_LEAST}; {SAVE_MOST} where that is not set"
)
CORRECTION_WORDS = (
    "`token` where the engine of `rollout.name` is a server, no other correction is chosen and "
    "`rollout.server.accept_gap` is false, else null"
)
KEPT_WORDS = f"{KEPT} where `save_freq` is not set either, else null"

_ONLINE = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "algorithm.rollout_correction.rollout_is",
)
"""Keys that only online runs read."""


def derived_values(config: Any) -> dict[str, Any]:
    """Path -> value of every derived key that was not written in a `RunConfig`."""
    arr, trainer = config.actor_rollout_ref, config.trainer
    found: dict[str, Any] = {}
    if "adv_estimator" not in config.algorithm.model_fields_set:
        is_compared = arr.rollout.n > 1 and "n" in arr.rollout.model_fields_set
        has_critic = bool(config.critic.model_fields_set)
        found["algorithm.adv_estimator"] = "grpo" if is_compared and not has_critic else "gae"
    if "n" not in arr.rollout.model_fields_set:
        facts = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
        is_written = "adv_estimator" in config.algorithm.model_fields_set
        is_group = is_written and facts is not None and facts.group_relative
        found["actor_rollout_ref.rollout.n"] = GROUP if is_group else 1
    if "ppo_mini_batch_size" not in arr.actor.model_fields_set:
        found["actor_rollout_ref.actor.ppo_mini_batch_size"] = config.data.train_batch_size
    if "lr" not in arr.actor.optim.model_fields_set:
        factor = ADAPTER_FACTOR if arr.model.lora_rank > 0 else 1
        found["actor_rollout_ref.actor.optim.lr"] = float(f"{RATES[trainer.stage] * factor:.6g}")
    if _needs_correction(config):
        found["algorithm.rollout_correction.rollout_is"] = "token"
    if "save_freq" not in trainer.model_fields_set:
        most = trainer.total_training_steps or SAVE_MOST * 10
        freq = min(max(most // 10, SAVE_LEAST), SAVE_MOST)
        found["trainer.save_freq"] = -1 if most < SAVE_LEAST else freq
        if "max_ckpt_to_keep" not in trainer.model_fields_set:
            found["trainer.max_ckpt_to_keep"] = KEPT
    return found


def _needs_correction(config: Any) -> bool:
    """Whether samples come from a server, whose arithmetic is its own, and nothing is chosen."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    facts = ROLLOUT_ENGINES.get(rollout.name)
    is_open = "rollout_is" not in correction.model_fields_set and not rollout.server.accept_gap
    is_other = correction.rollout_rs is not None or correction.bypass_mode
    return facts is not None and facts.is_server and is_open and not is_other


def derived_in_force(config: Any) -> dict[str, Any]:
    """The same without keys that a run of this stage does not read."""
    is_rl = config.trainer.stage == "rl"
    found = derived_values(config)
    return {p: value for p, value in found.items() if is_rl or p not in _ONLINE}
