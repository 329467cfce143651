"""G: keys that only a GPU reads."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_ARR = "actor_rollout_ref"


@rule("G01", "warning")
def device_reads_the_key(s: Situation) -> Iterator[Finding]:
    """Keys that only a GPU reads are changed only where there is one."""
    reasons = {
        f"{_ARR}.model.enable_activation_offload": "activations are in host memory already",
        f"{_ARR}.rollout.deterministic": "float32 is always exact where it can be",
        f"{_ARR}.rollout.enforce_eager": "a CPU has no graphs to replay",
        "trainer.profile.memory": "only CUDA keeps a history of allocations",
    }
    for field, reason in reasons.items():
        if s.where.device == "cpu" and s.is_changed(field):
            why = f"the run is on a CPU, where it has no effect: {reason}"
            yield Finding(field=field, why=why, fix="drop the line, or run on a GPU")
