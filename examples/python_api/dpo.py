"""DPO on pairs of a right and a wrong answer."""

import luyen

rows = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
    for a in range(10)
    for b in range(10)
]
run = luyen.train(
    {"data.train_batch_size": 8, "data.string_prompts": "user", "trainer.stage": "preference"},
    model="builtin://arithmetic",
    data=rows[10:],
    val_data=rows[:10],
    trainer={"total_training_steps": 3},
)
print(run.metrics()[-1]["preference/accuracy"])
