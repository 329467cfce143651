"""Validation as part of a run: rollouts on held-out prompts, scored and written down."""

from luyen.base.records import Prompt
from luyen.train.evaluate import scored_metrics
from luyen.train.groups import scored_groups
from luyen.train.run import OnlineRun
from luyen.train.sampling import validation_sampling


def validate(run: OnlineRun) -> None:
    """Measure the policy as it is; the numbers belong to the step that is done."""
    if run.data.validation is None:
        return
    prompts: tuple[Prompt, ...] = run.data.validation.prompts
    val_kwargs = run.config.actor_rollout_ref.rollout.val_kwargs
    run.take_up_validation()
    with run.phase("validate"):
        # The step is left out of the address: every validation draws the same random numbers.
        groups = run.generate(
            prompts,
            step=0,
            first=0,
            sampling=validation_sampling(run.config, run.data.renderer.tokenizer),
            purpose="validation",
            samples=val_kwargs.n,
        )
        known = len(run.broken)
        scored = scored_groups(run, groups, purpose="validation")
        run.reward.settle(scored)
    broken = run.broken[known:]
    metrics = scored_metrics(scored)
    if run.roles.generation.conversations is not None:
        metrics["val/faults"] = float(len(broken))
    played = [rollout for group in scored for rollout in group.rollouts]
    run.recorder.validation(run.step, [*played, *broken])
    run.metrics |= metrics
    run.validations.append(metrics)
    run.has_validated_later |= run.step > 0
