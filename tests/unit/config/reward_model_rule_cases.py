"""Rules of learned rewards: overrides that trigger each, and overrides close by that do not."""

RM = "reward.reward_model"
ON = (f"{RM}.enable=true", f"{RM}.model_path=org/rm")
POOL = (*ON, f"{RM}.enable_resource_pool=true", f"{RM}.nnodes=1", f"{RM}.n_gpus_per_node=2")
STAGE = "trainer.stage=reward_model"
LORA = ("actor_rollout_ref.model.lora_rank=4",)

REWARD_MODEL_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "D07": ((f"{RM}.enable=true",), ON),
    "D08": ((f"{RM}.rollout.max_num_seqs=8",), (f"{RM}.rollout.max_num_seqs=8", *ON)),
    "E01": ((*POOL, "trainer.runtime=local"), POOL),
    "E02": (
        (*POOL, f"{RM}.rollout.data_parallel_size=3"),
        (*POOL, f"{RM}.rollout.data_parallel_size=1"),
    ),
    "E03": (
        (*ON, f"{RM}.rollout.max_model_len=1023"),
        (*ON, f"{RM}.rollout.max_model_len=1024"),
    ),
    "E04": ((*ON, f"{RM}.nnodes=1"), POOL),
    "Y08": (
        (STAGE, *LORA, "actor_rollout_ref.model.target_modules=[q_proj,score]"),
        (STAGE, *LORA),
    ),
    "Y09": (
        (STAGE, "reward_training.target_key=rating"),
        (
            STAGE,
            "reward_training.target_key=rating",
            "reward_training.objective=regression",
        ),
    ),
}
