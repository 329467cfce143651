"""Rules of teachers and of sampled pairs: overrides that trigger each, and ones that do not."""

A = "actor_rollout_ref.actor"
TEACHER = "distill.teacher_path=builtin://arithmetic"
GIVEN = ("trainer.stage=distill", TEACHER)
OWN = ("distill.on_policy=true", TEACHER)
PAIRS = (
    "algorithm.adv_estimator=online_dpo",
    "actor_rollout_ref.rollout.n=4",
    f"{A}.policy_loss.loss_mode=reinforce",
    f"{A}.loss_agg_mode=token-sum",
    f"{A}.ppo_mini_batch_size=1024",
)

TEACHER_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "H01": (("trainer.stage=distill",), GIVEN),
    "H02": ((*GIVEN, "distill.on_policy=true"), OWN),
    "H03": ((*GIVEN, "distill.beta=0.1"), (*GIVEN, "distill.beta=0.1", "distill.divergence=jsd")),
    "H04": (
        (*OWN, "algorithm.use_kl_in_reward=true"),
        (*OWN, "algorithm.use_kl_in_reward=true", "distill.task_weight=1.0"),
    ),
    "H05": (
        (*OWN, "algorithm.adv_estimator=reinforce"),
        (*OWN, "algorithm.adv_estimator=reinforce", "distill.task_weight=1.0"),
    ),
    "J01": ((*PAIRS, f"{A}.ppo_epochs=2"), PAIRS),
    "J02": ((*PAIRS, "preference.loss_type=kto"), (*PAIRS, "preference.loss_type=ipo")),
    "J03": ((*PAIRS, "preference.use_margins=true"), (*PAIRS, "preference.beta=0.5")),
}
