"""Your own training loop over the roles of a run: the same file in this process and on Ray.

    python examples/custom_loop.py [CONFIG.yaml]... [key=value]...
    python examples/custom_loop.py trainer.n_gpus_per_node=2  # on Ray

The loop below is best-of-n distillation, which no recipe offers: draw several answers, keep the
best one of each prompt, and learn from it alone, with weight 1 on its tokens. Everything it uses is
a handle of a role: `generate`, `update_actor`, `publish`, and the reward. Where they run is
configured.
"""

import sys
from pathlib import Path

import torch

from luyen.base.process_setup import prepare_process
from luyen.base.records import Rollout
from luyen.config.check import check
from luyen.rollout.single_turn import Group
from luyen.train.batch import pack_groups
from luyen.train.run import OnlineRun
from luyen.train.start import prepare_online

DEFAULTS = (
    "data.train_files=arithmetic://sum?digits=1",
    "data.train_batch_size=16",
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    "actor_rollout_ref.model.path=builtin://arithmetic",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=3",
    "trainer.experiment_name=custom_loop",
    "trainer.logger=jsonl",
)


def main(words: list[str]) -> list[float]:
    """Train for the configured steps; the mean reward of each."""
    files = [Path(word) for word in words if "=" not in word]
    report = check(files, [*(() if files else DEFAULTS), *(w for w in words if "=" in w)])
    for problem in report.problems:
        print(problem.severity, problem.field, problem.why)
    assert report.is_sound, "the configuration has errors"
    run = prepare_online(report)
    try:
        run.roles.publish(run.version).wait()
        return [one_step(run, step) for step in run.steps()]
    finally:
        run.recorder.close()
        run.reward.close()
        run.roles.close()


def one_step(run: OnlineRun, step: int) -> float:
    """Draw, judge, keep the best of each group, learn from it."""
    count = run.config.data.train_batch_size
    prompts = [run.data.train.prompts[row] for row in run.submitter.next_rows(count)]
    drawn = run.generate(prompts, step=step, first=0, sampling=run.sampling)
    judged = run.reward.score([(group.prompt, group.rollouts) for group in drawn])
    rewards = [score.value or 0.0 for group in judged for score in group.scores]
    best = [
        Group(prompt=group.prompt, rollouts=(max(group.rollouts, key=_reward),)) for group in judged
    ]
    batch = pack_groups(best, run.roles.device)
    ones = torch.ones(batch.tokens.shape, device=batch.tokens.device)
    ready = batch.with_streams(advantages=ones, returns=ones)
    lr = run.config.actor_rollout_ref.actor.optim.lr
    updated = run.roles.update_actor(ready, run.objective, lr=lr, seed=step).result()
    run.step += 1
    run.version += 1
    run.roles.publish(run.version).wait()
    mean = sum(rewards) / len(rewards)
    loss = updated.metrics["actor/pg_loss"]
    print(f"step {step}: reward {mean:.3f}, loss {loss:.4f}, norm {updated.stepped.grad_norm:.4f}")
    return mean


def _reward(rollout: Rollout) -> float:
    score = rollout.score
    return float("-inf") if score is None or score.value is None else score.value


if __name__ == "__main__":
    prepare_process()  # before the first matrix product
    main(sys.argv[1:])
