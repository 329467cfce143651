"""SFT on conversations that a program makes."""

import luyen

rows = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+{b}="},
            {"role": "assistant", "content": str(a + b)},
        ]
    }
    for a in range(10)
    for b in range(10)
]
run = luyen.train(
    {"data.train_batch_size": 8, "trainer.stage": "sft"},
    model="builtin://arithmetic",
    data=rows[10:],
    val_data=rows[:10],
    trainer={"total_training_steps": 3},
)
print(run.metrics()[-1]["sft/nll"])
