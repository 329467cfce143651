"""GRPO with a reward function and rows of one's own."""

import luyen


def right(completions: list[str], answer: list[str]) -> list[float]:
    """1 for every completion that is the answer."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
run = luyen.train(
    {"data.train_batch_size": 8, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 4},
    model="builtin://arithmetic",
    data=rows[10:],
    val_data=rows[:10],
    reward=right,
    trainer={"total_training_steps": 3},
)
print(run.metrics()[-1]["reward/mean"])
