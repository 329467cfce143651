"""Rules of the life of a run: overrides that trigger each, and overrides close by that do not."""

GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")

LIFE_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "S01": (("trainer.device=cuda",), ("trainer.device=cpu",)),
    "S02": (("trainer.n_gpus_per_node=2", "trainer.runtime=local"), ("trainer.n_gpus_per_node=2",)),
    "S03": (("trainer.n_gpus_per_node=2",), ()),
    "S04": (
        ("trainer.total_training_steps=10", "trainer.save_freq=11"),
        ("trainer.total_training_steps=10", "trainer.save_freq=10"),
    ),
    "S05": (
        ("trainer.test_freq=5",),
        ("trainer.test_freq=5", "data.val_files=arithmetic://sum?x=1"),
    ),
    "S06": (
        ("trainer.resume_mode=path",),
        ("trainer.resume_mode=path", "trainer.resume_from_path=HERE"),
    ),
    "S07": (
        ("trainer.resume_mode=disable", "trainer.default_local_dir=SAVED"),
        ("trainer.resume_mode=disable",),
    ),
    "S08": (("trainer.default_local_dir=SAVED",), ("trainer.default_local_dir=HERE",)),
    "S24": (
        ("trainer.default_local_dir=BEGUN", "trainer.seed=1"),
        ("trainer.default_local_dir=BEGUN", "trainer.save_freq=1"),
    ),
    "S09": (("trainer.logger=[console, wanbd]",), ("trainer.logger=[console]",)),
    "S10": (("trainer.critic_warmup=5", *GRPO), ("trainer.critic_warmup=5",)),
    "S11": (
        ("trainer.total_training_steps=10", "trainer.total_epochs=3"),
        ("trainer.total_epochs=3",),
    ),
    "S12": (("trainer.plugins=/nowhere/p.py",), ("trainer.plugins=PLUGIN",)),
    "S14": (("trainer.logger=[console, wandb]",), ("trainer.logger=[console, jsonl]",)),
    "S15": (("trainer.experiment_name=../../etc",), ("trainer.experiment_name=a-b_c.1",)),
    "S13": (("OLD",), ()),
    "S23": (("trainer.default_local_dir=TOOLS/runs",), ("trainer.default_local_dir=HERE/a/b",)),
    "S16": (("trainer.profile.steps=[0, 2]",), ("trainer.profile.steps=[1, 2]",)),
    "S17": (
        ("trainer.profile.steps=[2, 4]", "trainer.total_training_steps=3"),
        ("trainer.profile.steps=[2, 3]", "trainer.total_training_steps=3"),
    ),
    "S18": (
        ("trainer.profile.save_path=traces",),
        ("trainer.profile.save_path=traces", "trainer.profile.steps=[1]"),
    ),
    "S21": (
        ("trainer.keep_best=2", "trainer.save_freq=5"),
        ("trainer.keep_best=2", "trainer.max_ckpt_to_keep=1"),
    ),
    "S22": (
        ("trainer.keep_best=2", "trainer.max_ckpt_to_keep=1"),
        ("trainer.keep_best=2", "trainer.max_ckpt_to_keep=1", "trainer.best_metric=reward/mean"),
    ),
    "A13": (
        ("trainer.early_stopping.metric=val/accuracy",),
        ("trainer.early_stopping.metric=reward/mean",),
    ),
    "A14": (
        ("trainer.early_stopping.patience=5",),
        ("trainer.early_stopping.patience=5", "trainer.early_stopping.metric=reward/mean"),
    ),
    "S19": (
        ("trainer.watchdog.budgets={genrate: 60}",),
        ("trainer.watchdog.budgets={generate: 60}",),
    ),
    "S25": (
        ("trainer.timeouts.silence_s=300",),
        ("trainer.timeouts.silence_s=300", "trainer.n_gpus_per_node=2"),
    ),
    "S20": (
        ("trainer.watchdog.budget_s=0", "trainer.watchdog.on_hang=stop"),
        ("trainer.watchdog.on_hang=stop",),
    ),
}
