"""Rules about what a run can carry out: overrides that trigger each, and some that do not."""

A = "actor_rollout_ref.actor"
M = "actor_rollout_ref.model"
R = "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")
SHARED = (f"{R}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
FILTER = ("algorithm.filter_groups.enable=true",)
NF4 = f"{M}.quantization=nf4"
DISTILL = "trainer.stage=distill"
TRACES = "data.train_files=arithmetic://sum?traces=1"
SENT = (f"{M}.lora_rank=4", f"{R}.server.lora_format=adapter", f"{R}.server.transport=folder")

FIT_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "R02": (
        (f"{R}.name=far", "trainer.plugins=ENGINES"),
        (f"{R}.name=near", "trainer.plugins=ENGINES"),
    ),
    "R08": (
        (f"{R}.expert_parallel_size=2", "trainer.n_gpus_per_node=2", f"{R}.name=hf"),
        (
            f"{R}.expert_parallel_size=2",
            "trainer.n_gpus_per_node=2",
            f"{R}.name=near",
            "trainer.plugins=ENGINES",
        ),
    ),
    "R32": (
        (f"{R}.expert_parallel_size=4", *SHARED, f"{M}.path=MIXTURE"),
        (f"{R}.expert_parallel_size=2", *SHARED, f"{M}.path=MIXTURE"),
    ),
    "R33": (
        (f"{R}.expert_parallel_size=1", *SHARED, f"{M}.path=MIXTURE"),
        (f"{R}.expert_parallel_size=2", *SHARED, f"{M}.path=MIXTURE"),
    ),
    "R34": (
        (f"{R}.cuda_ipc=true",),
        (f"{R}.cuda_ipc=true", "trainer.runtime=ray", "trainer.device=cuda"),
    ),
    "R31": (
        (f"{R}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=3"),
        (f"{R}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
    ),
    "F04": (
        (f"{A}.strategy=fsdp2",),
        (f"{A}.strategy=fsdp2", "trainer.n_gpus_per_node=2"),
    ),
    "D17": (
        ("data.train_files=arithmetic://sum?pairs=even",),
        ("data.train_files=arithmetic://sum?pairs=even", "trainer.stage=preference"),
    ),
    "D21": (("data.train_files=PLAIN", "READ"), ("data.train_files=ASKED", "READ")),
    "D14": (("data.train_max_samples=0",), ("data.train_max_samples=1",)),
    "D15": (
        ("data.apply_chat_template_kwargs={tools: 3}",),
        ("data.apply_chat_template_kwargs={enable_thinking: false}",),
    ),
    "D16": (("data.prompt_key=question",), ("data.prompt_key=question", "data.train_files=ROWS")),
    "A10": (
        (*GRPO, *FILTER, "algorithm.filter_groups.metric=digits"),
        (*GRPO, *FILTER, "algorithm.filter_groups.metric=exact"),
    ),
    "M12": (
        (f"{M}.lora_rank=4", f"{M}.target_modules=[no_such]"),
        (f"{M}.lora_rank=4", f"{M}.target_modules=[q_proj]"),
    ),
    "M13": ((f"{A}.optim.betas=[1.0, 0.9]",), (f"{A}.optim.betas=[0.0, 0.9]",)),
    "M14": ((f"{A}.optim.name=adamw_8bit",), (f"{A}.optim.name=adamw",)),
    "M15": (
        (f"{A}.optim.name=muon", "trainer.n_gpus_per_node=2"),
        (f"{A}.optim.name=muon",),
    ),
    "M16": (
        (f"{A}.optim.momentum=0.9",),
        (f"{A}.optim.momentum=0.9", f"{A}.optim.name=muon"),
    ),
    "M17": ((NF4,), (NF4, f"{M}.lora_rank=4")),
    "M18": ((NF4, f"{M}.lora_rank=4"), (f"{M}.lora_rank=4",)),
    "M19": (
        (NF4, f"{M}.lora_rank=4", f"{R}.name=openai"),
        (NF4, f"{M}.lora_rank=4", f"{R}.name=hf"),
    ),
    "M20": (
        (f"{M}.double_quantization=false",),
        (f"{M}.double_quantization=false", NF4, f"{M}.lora_rank=4"),
    ),
    "M21": (
        (f"{M}.lora_rank=4", f"{M}.lora_dropout=0.1"),
        (f"{M}.lora_rank=4", f"{M}.lora_dropout=0.1", "trainer.stage=sft", TRACES),
    ),
    "M22": (
        (*SENT, f"{R}.name=sglang", f"{M}.use_rslora=true"),
        (*SENT, f"{R}.name=vllm", f"{M}.use_rslora=true"),
    ),
    "H07": (
        (f"{M}.lora_rank=4", f"{M}.use_dora=true", "trainer.n_gpus_per_node=2"),
        (f"{M}.lora_rank=4", f"{M}.use_dora=true"),
    ),
    "H06": (
        (DISTILL, TRACES, "distill.teacher_path=builtin://tools"),
        (DISTILL, TRACES, "distill.teacher_path=builtin://arithmetic"),
    ),
    "Y10": (
        ("trainer.stage=sft", TRACES, f"{R}.n=4"),
        ("trainer.stage=sft", TRACES, f"{A}.optim.lr=1.0e-4"),
    ),
}
