"""For every rule: overrides that trigger it, and overrides close by that do not."""

from tests.unit.config.fit_rule_cases import FIT_CASES
from tests.unit.config.input_rule_cases import INPUT_CASES
from tests.unit.config.life_rule_cases import LIFE_CASES
from tests.unit.config.offline_rule_cases import OFFLINE_CASES
from tests.unit.config.pressure_rule_cases import PRESSURE_CASES
from tests.unit.config.reward_model_rule_cases import REWARD_MODEL_CASES
from tests.unit.config.reward_rule_cases import REWARD_CASES
from tests.unit.config.sampling_rule_cases import SAMPLING_CASES
from tests.unit.config.teacher_rule_cases import TEACHER_CASES

GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
A = "actor_rollout_ref.actor"
KL = (f"{A}.use_kl_loss=true",)
R = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
M = "actor_rollout_ref.model"
C = "algorithm.rollout_correction"
MINI = f"{A}.ppo_mini_batch_size=256"
T = f"{R}.multi_turn"

DEVICES = ("trainer.n_gpus_per_node=2",)
MOVED = ("trainer.device=cuda", f"{A}.fsdp_config.optimizer_offload=true")

# id -> (overrides that trigger it, overrides close by that do not)
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "B01": (
        (MINI, "data.train_batch_size=128"),
        ("data.train_batch_size=128",),
    ),
    "F01": (
        (f"{A}.fsdp_config.reshard_after_forward=false",),
        (f"{A}.fsdp_config.reshard_after_forward=false", "trainer.n_gpus_per_node=2"),
    ),
    "F02": (
        (f"{A}.fsdp_config.param_offload=true", "trainer.n_gpus_per_node=2"),
        (
            f"{A}.fsdp_config.param_offload=true",
            f"{A}.fsdp_config.optimizer_offload=true",
            "trainer.n_gpus_per_node=2",
        ),
    ),
    "F03": (
        (f"{A}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"),
        (f"{A}.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=4"),
    ),
    "F07": (
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=3"),
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=4"),
    ),
    "F13": (
        ("trainer.stage=sft", f"{A}.fsdp_config.tensor_parallel_size=2", *DEVICES),
        ("trainer.stage=sft", *DEVICES),
    ),
    "F14": (
        (*MOVED, f"{A}.optim.name=muon"),
        MOVED,
    ),
    "F12": (
        (
            "trainer.stage=distill",
            f"{A}.fsdp_config.ulysses_sequence_parallel_size=2",
            "trainer.n_gpus_per_node=2",
        ),
        (
            "trainer.stage=sft",
            f"{A}.fsdp_config.ulysses_sequence_parallel_size=2",
            "trainer.n_gpus_per_node=2",
        ),
    ),
    "F08": ((f"{A}.strategy=veomni",), (f"{A}.strategy=fsdp2",)),
    "F15": (
        (f"{A}.strategy=megatron", f"{M}.lora_rank=4", *DEVICES),
        (f"{A}.strategy=megatron", *DEVICES),
    ),
    "F16": (
        (f"{A}.strategy=megatron",),
        (f"{A}.strategy=megatron", *DEVICES),
    ),
    "F17": (
        (
            f"{A}.strategy=megatron",
            f"{A}.fsdp_config.tensor_parallel_size=8",
            "trainer.n_gpus_per_node=8",
        ),
        (f"{A}.strategy=megatron", *DEVICES),
    ),
    "F18": (
        (f"{A}.fsdp_config.expert_parallel_size=2", *DEVICES),
        (f"{A}.fsdp_config.expert_parallel_size=1", *DEVICES),
    ),
    "F09": (
        (f"{A}.strategy=deepspeed", "trainer.n_gpus_per_node=2"),
        (f"{A}.strategy=fsdp2", "trainer.n_gpus_per_node=2"),
    ),
    "F10": (
        (f"{A}.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=3"),
        (f"{A}.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=4"),
    ),
    "F11": (
        (
            f"{A}.fsdp_config.tensor_parallel_size=2",
            f"{A}.fsdp_config.ulysses_sequence_parallel_size=2",
            "trainer.n_gpus_per_node=4",
        ),
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=4"),
    ),
    "F05": (
        (*KL, f"{REF}.nnodes=1", "trainer.runtime=local"),
        (*KL, f"{REF}.nnodes=1", "trainer.runtime=ray"),
    ),
    "F06": (
        (*GRPO, "critic.nnodes=1"),
        (f"{REF}.n_gpus_per_node=1", *KL, f"{REF}.nnodes=1"),
    ),
    "G02": ((f"{M}.dtype=bfloat16",), (f"{M}.dtype=float32",)),
    "B02": (
        (MINI, "data.train_batch_size=300"),
        (MINI, "data.train_batch_size=512"),
    ),
    "B03": (
        ("trainer.n_gpus_per_node=3",),
        ("trainer.n_gpus_per_node=4",),
    ),
    "B04": (
        (f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=7"),
        (f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=8"),
    ),
    "B05": (
        (f"{A}.ppo_max_token_len_per_gpu=1023",),
        (f"{A}.ppo_max_token_len_per_gpu=1024",),
    ),
    "B06": (
        (f"{A}.use_dynamic_bsz=false",),
        (f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=1"),
    ),
    "B07": (
        (f"{A}.ppo_micro_batch_size_per_gpu=2",),
        (f"{A}.ppo_micro_batch_size_per_gpu=2", f"{A}.use_dynamic_bsz=false"),
    ),
    "B08": (("critic.ppo_mini_batch_size=100",), ("critic.ppo_mini_batch_size=128",)),
    "B09": (
        (f"{R}.log_prob_max_token_len_per_gpu=100",),
        (f"{R}.log_prob_max_token_len_per_gpu=2048",),
    ),
    "B10": (
        (f"{R}.log_prob_micro_batch_size_per_gpu=4",),
        (f"{R}.log_prob_micro_batch_size_per_gpu=4", f"{R}.log_prob_use_dynamic_bsz=false"),
    ),
    "A01": (("algorithm.adv_estimator=grop",), ("algorithm.adv_estimator=gae",)),
    "A02": (("algorithm.adv_estimator=rloo", f"{R}.n=1"), ("algorithm.adv_estimator=rloo",)),
    "A03": (("critic.enable=false",), ("critic.enable=false", *GRPO)),
    "A04": (("critic.enable=true", *GRPO), ("critic.enable=true",)),
    "A05": (
        ("algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1.0]"),
        ("algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1.0, 2.0]"),
    ),
    "A06": (
        ("algorithm.adv_estimator=optimal_token_baseline", f"{R}.n=4"),
        (
            "algorithm.adv_estimator=optimal_token_baseline",
            f"{R}.n=4",
            f"{A}.calculate_sum_pi_squared=true",
        ),
    ),
    "A07": (("algorithm.lam=0.9", *GRPO), ("algorithm.lam=0.9",)),
    "A08": (
        ("algorithm.filter_groups.enable=true", *GRPO),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", *GRPO),
    ),
    "A09": (("algorithm.adv_estimator=gae", f"{R}.n=4"), (f"{R}.n=4",)),
    "L01": ((f"{A}.policy_loss.loss_mode=vanila",), (f"{A}.policy_loss.loss_mode=sapo",)),
    "L02": ((f"{A}.tau_pos=2.0",), (f"{A}.tau_pos=2.0", f"{A}.policy_loss.loss_mode=sapo")),
    "L03": (
        (f"{A}.policy_loss.loss_mode=dro",),
        (f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0.1"),
    ),
    "L04": (
        (f"{A}.loss_scale_factor=100",),
        (f"{A}.loss_scale_factor=100", f"{A}.loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    "L05": (
        (f"{A}.policy_loss.loss_mode=gspo",),
        (f"{A}.policy_loss.loss_mode=gspo", f"{A}.clip_ratio=3e-4"),
    ),
    "L06": (
        (f"{A}.policy_loss.loss_mode=sapo", f"{A}.loss_agg_mode=token-mean"),
        (f"{A}.policy_loss.loss_mode=sapo", f"{A}.loss_agg_mode=seq-mean-token-mean"),
    ),
    "L07": (
        (f"{A}.adaptive_entropy.enable=true", f"{A}.entropy_coeff=2.0"),
        (f"{A}.adaptive_entropy.enable=true", f"{A}.entropy_coeff=0.5"),
    ),
    "L09": (
        (f"{A}.policy_loss.loss_mode=vespo", f"{C}.rollout_is=sequence"),
        (f"{A}.policy_loss.loss_mode=vespo", f"{C}.rollout_is=token"),
    ),
    "L08": (
        (f"{A}.adaptive_entropy.target=0.5",),
        (f"{A}.adaptive_entropy.target=0.5", f"{A}.adaptive_entropy.enable=true"),
    ),
    "K01": ((f"{REF}.enable=false", f"{A}.use_kl_loss=true"), (f"{REF}.enable=false",)),
    "K02": (
        (f"{A}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"),
        (f"{A}.use_kl_loss=true",),
    ),
    "K03": ((f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0"), (f"{A}.use_kl_loss=true",)),
    "K04": (
        ("algorithm.kl_penalty=k3",),
        ("algorithm.kl_penalty=k3", "algorithm.use_kl_in_reward=true"),
    ),
    "K06": ((f"{A}.kl_loss_type=k4",), (f"{A}.kl_loss_type=k3+",)),
    "K07": ((f"{REF}.enable=true",), (f"{REF}.enable=true", f"{A}.use_kl_loss=true")),
    "K08": (
        (f"{M}.lora_rank=8", f"{REF}.path=org/base", f"{A}.use_kl_loss=true"),
        (f"{REF}.path=org/base", f"{A}.use_kl_loss=true"),
    ),
    "K09": (
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 200}"),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive}"),
    ),
    "O01": (("trainer.max_staleness=1",), ("trainer.max_staleness=1", f"{C}.rollout_is=token")),
    "O02": (
        (f"{C}.rollout_is=token", f"{R}.calculate_log_probs=false"),
        (f"{C}.rollout_is=token",),
    ),
    "O03": (
        (f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=5_0.5"),
        (f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=0.5_5"),
    ),
    "O04": (
        (f"{C}.rollout_rs=token_k9", f"{C}.rollout_rs_threshold=0.1"),
        (f"{C}.rollout_rs=token_k3", f"{C}.rollout_rs_threshold=0.1"),
    ),
    "O05": (
        (f"{C}.rollout_is_threshold=3.0",),
        (f"{C}.rollout_is_threshold=3.0", f"{C}.rollout_is=token"),
    ),
    "O06": (
        (f"{C}.bypass_mode=true", f"{A}.policy_loss.loss_mode=cispo"),
        (f"{C}.bypass_mode=true",),
    ),
    "O07": ((f"{R}.top_p=0.9", MINI), (f"{R}.top_p=0.9",)),
    "O08": (
        ("trainer.async_order=completion",),
        ("trainer.async_order=completion", "trainer.max_staleness=1", f"{C}.rollout_is=token"),
    ),
    "R01": ((f"{R}.name=vlm",), (f"{R}.name=hf",)),
    "R03": ((f"{R}.max_model_len=1000",), (f"{R}.max_model_len=1024",)),
    "R04": (
        (f"{R}.n=300", "algorithm.adv_estimator=grpo"),
        (f"{R}.n=256", "algorithm.adv_estimator=grpo"),
    ),
    "R05": ((f"{R}.max_num_batched_tokens=128",), (f"{R}.max_num_batched_tokens=256",)),
    "R06": ((*GRPO, f"{R}.temperature=0"), (*GRPO, f"{R}.temperature=0.7")),
    "R07": (
        (f"{R}.val_kwargs.do_sample=true",),
        (f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=1"),
    ),
    "R09": (
        (f"{R}.data_parallel_size=2",),
        (f"{R}.data_parallel_size=2", "trainer.n_gpus_per_node=2"),
    ),
    "R11": (
        (f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2", f"{R}.data_parallel_size=1"),
        (f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2"),
    ),
    "R12": (
        (f"{R}.nnodes=1", "trainer.runtime=local"),
        (f"{R}.nnodes=1", "trainer.runtime=ray"),
    ),
    "R13": (
        (f"{R}.n_gpus_per_node=2",),
        (f"{R}.n_gpus_per_node=2", f"{R}.nnodes=1"),
    ),
    "R10": ((f"{R}.max_num_batched_tokens=500",), (f"{R}.max_num_batched_tokens=512",)),
    "T01": ((f"{T}.enable=true", "data.return_raw_chat=false"), (f"{T}.enable=true",)),
    "T02": (
        (f"{T}.enable=true", "data.filter_overlong_prompts=false", "data.truncation=left"),
        ("data.filter_overlong_prompts=false", "data.truncation=left"),
    ),
    "T03": (
        (f"{T}.enable=true", f"{T}.tool_config_path=TOOLS"),
        (f"{T}.enable=true", f"{T}.tool_config_path=TOOLS", "data.max_prompt_length=2048"),
    ),
    "T04": ((f"{T}.enable=true",), (f"{T}.enable=true", f"{T}.function_tool_path=TOOLS")),
    "T05": (
        (f"{T}.enable=true", f"{T}.tool_config_path=/nowhere/tools.yaml"),
        (f"{T}.enable=true", f"{T}.tool_config_path=TOOLS"),
    ),
    "T06": ((f"{T}.max_user_turns=3",), (f"{T}.max_user_turns=3", f"{T}.enable=true")),
    "T07": (
        (f"{T}.enable=true", f"{T}.max_assistant_turns=9"),
        (f"{T}.enable=true", f"{T}.max_assistant_turns=8"),
    ),
    "T08": ((f"{T}.format=hermse",), (f"{T}.format=llama3",)),
    "T09": (
        (f"{T}.enable=true", f"{T}.environment=clerk"),
        (
            f"{T}.enable=true",
            f"{T}.environment=clerk",
            f"{T}.environments={{clerk: {{kind: user}}}}",
        ),
    ),
    "T10": (
        (f"{T}.enable=true", f"{R}.n=2", f"{T}.min_samples=3"),
        (f"{T}.enable=true", f"{R}.n=2", f"{T}.min_samples=2"),
    ),
    "T11": (
        (f"{T}.enable=true", f"{T}.on_fault=keep_min", f"{T}.fault_retries=2"),
        (f"{T}.enable=true", f"{T}.fault_retries=2"),
    ),
    "T12": (
        (f"{T}.enable=true", f"{T}.tool_config_path=BROKEN"),
        (f"{T}.enable=true", f"{T}.tool_config_path=TOOLS"),
    ),
    "T13": (
        (f"{T}.enable=true", f"{T}.interaction_config_path=BROKEN"),
        (f"{T}.enable=true", f"{T}.interaction_config_path=USERS"),
    ),
    "G01": ((f"{R}.deterministic=false",), (f"{R}.deterministic=true",)),
    "M01": ((f"{M}.path=/nowhere/model",), (f"{M}.path=HERE",)),
    "M06": ((f"{M}.path=HERE",), ()),
    "M07": ((f"{M}.path=DEAF",), ()),
    "M02": (("data.train_files=TOOLS",), ("data.train_files=TOOLS", f"{M}.path=org/model")),
    "M03": ((f"{M}.lora_alpha=32",), (f"{M}.lora_alpha=32", f"{M}.lora_rank=8")),
    "M04": ((f"{A}.optim.lr=0.1",), (f"{A}.optim.lr=1e-5",)),
    "M05": (
        ("trainer.total_training_steps=10", f"{A}.optim.lr_warmup_steps=11"),
        ("trainer.total_training_steps=10", f"{A}.optim.lr_warmup_steps=10"),
    ),
    "M11": (
        (f"{A}.optim.lr_warmup_steps=9", f"{A}.optim.lr_warmup_steps_ratio=0.1"),
        (f"{A}.optim.lr_warmup_steps=-1", f"{A}.optim.lr_warmup_steps_ratio=0.1"),
    ),
    "P01": ((f"{R}.max_num_seqs=100000", "data.train_batch_size=51200"), ()),
    "P02": (
        (
            f"{A}.ppo_max_token_len_per_gpu=10000000",
            "data.train_batch_size=51200",
            f"{A}.ppo_mini_batch_size=51200",
        ),
        (),
    ),
}

CASES |= (
    REWARD_CASES | REWARD_MODEL_CASES | LIFE_CASES | OFFLINE_CASES | TEACHER_CASES | SAMPLING_CASES
)
CASES |= FIT_CASES | INPUT_CASES | PRESSURE_CASES
