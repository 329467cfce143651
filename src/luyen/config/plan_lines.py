"""The arithmetic of a step in words."""

from luyen.config.plan import BatchPlan


def offline_lines(plan: BatchPlan) -> list[tuple[str, str]]:
    """The arithmetic of a stage that learns from given rows, for people."""
    each = plan.samples_per_prompt
    sequences = f"{plan.prompts} rows x {each} sequence{'' if each == 1 else 's'} = {plan.rollouts}"
    micros = f"about {plan.micro_batches} of at most {plan.micro_batch_tokens} tokens"
    tokens = f"at most {plan.tokens} a step, {plan.longest_sequence} a sequence"
    return [
        ("sequences", sequences),
        ("micro-batches", f"{micros} on each device"),
        ("optimizer steps", "1 a step"),
        ("tokens", tokens),
        ("steps", str(plan.total_steps or "as many as the rows and total_epochs make")),
    ]


def batch_lines(plan: BatchPlan) -> list[tuple[str, str]]:
    """The arithmetic as label and sentence, for people."""
    each = plan.samples_per_prompt
    samples = f"{plan.prompts} prompts x {each} sample{'' if each == 1 else 's'} = {plan.rollouts}"
    minis = f"{plan.mini_batches} x {plan.mini_batch_rollouts} rollouts"
    micros = f"about {plan.micro_batches} of at most {plan.micro_batch_tokens} tokens"
    steps = f"{plan.mini_batches} (mini-batches) x {plan.epochs} (epochs) = {plan.optimizer_steps}"
    tokens = f"at most {plan.tokens} a step, {plan.longest_sequence} a sequence"
    if plan.computed_tokens < plan.tokens:
        tokens += f"; {plan.computed_tokens} computed, prompts once a group"
    return [
        ("rollouts", samples),
        ("mini-batches", minis),
        ("micro-batches", f"{micros} on each device"),
        ("optimizer steps", f"{steps} a step"),
        ("tokens", tokens),
        ("steps", str(plan.total_steps or "as many as the rows and total_epochs make")),
    ]
