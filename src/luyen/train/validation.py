"""Validation as part of a run: rollouts on held-out prompts, scored and written down."""

from luyen.base.records import Prompt
from luyen.rollout.protocol import Sampling
from luyen.train.evaluate import validation_metrics
from luyen.train.groups import scored_groups
from luyen.train.run import OnlineRun
from luyen.train.samples import reward_of


def validate(run: OnlineRun) -> None:
    """Measure the policy as it is; the numbers belong to the step that is done."""
    if run.data.validation is None:
        return
    prompts: tuple[Prompt, ...] = run.data.validation.prompts
    val_kwargs = run.config.actor_rollout_ref.rollout.val_kwargs
    with run.phase("validate"):
        # The step is left out of the address: every validation draws the same random numbers.
        groups = run.generate(
            prompts,
            step=0,
            first=0,
            sampling=validation_sampling(run),
            purpose="validation",
            samples=val_kwargs.n,
        )
        scored = scored_groups(run, groups)
        run.reward.settle(scored)
    rewards: dict[str, list[list[float]]] = {}
    for group in scored:
        judged = [r for r in group.rollouts if r.score is not None and r.score.value is not None]
        if judged:
            found = rewards.setdefault(group.prompt.data_source, [])
            found.append([reward_of(rollout) for rollout in judged])
    metrics = validation_metrics(rewards)
    run.recorder.validation(run.step, [r for group in scored for r in group.rollouts])
    run.metrics |= metrics
    run.note_validation(metrics)


def validation_sampling(run: OnlineRun) -> Sampling:
    """How validation draws: greedily unless `val_kwargs.do_sample`."""
    val_kwargs = run.config.actor_rollout_ref.rollout.val_kwargs
    return Sampling(
        max_new_tokens=run.sampling.max_new_tokens,
        temperature=val_kwargs.temperature if val_kwargs.do_sample else 0.0,
        top_k=val_kwargs.top_k if val_kwargs.do_sample else -1,
        top_p=val_kwargs.top_p if val_kwargs.do_sample else 1.0,
        stop_ids=run.sampling.stop_ids,
    )
