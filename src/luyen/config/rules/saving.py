"""S: which checkpoints stay."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule

_VALIDATION = "val/"


@rule("S21", "warning")
def best_ones_are_chosen(s: Situation) -> Iterator[Finding]:
    """Keeping the best has an effect: some others go, and some best ones stay."""
    trainer = s.config.trainer
    if trainer.keep_best and trainer.max_ckpt_to_keep is None:
        why = "every checkpoint stays, since max_ckpt_to_keep is not set"
        fix = "set trainer.max_ckpt_to_keep, or drop it"
        yield Finding(field="trainer.keep_best", why=why, fix=fix)
    for key in ("best_metric", "best_mode"):
        if not trainer.keep_best and s.is_changed(f"trainer.{key}"):
            why, fix = "keep_best is 0: no checkpoint is best", "set trainer.keep_best, or drop it"
            yield Finding(field=f"trainer.{key}", why=why, fix=fix)


@rule("S22", "error")
def best_metric_is_measured(s: Situation) -> Iterator[Finding]:
    """The metric that decides which checkpoints stay is one that the run measures."""
    trainer = s.config.trainer
    if not trainer.keep_best or not trainer.best_metric.startswith(_VALIDATION):
        return
    if trainer.stage != "rl":
        why = f"a run of the stage {trainer.stage} measures no such metric"
        fix = "set it to one that it does, e.g. sft/val_nll or preference/val_accuracy"
        yield Finding(field="trainer.best_metric", why=why, fix=fix)
    elif not s.config.data.val_files:
        why = "data.val_files is empty: nothing measures it, and no checkpoint would be best"
        fix = "set data.val_files, or a metric of training such as reward/mean"
        yield Finding(field="trainer.best_metric", why=why, fix=fix)
