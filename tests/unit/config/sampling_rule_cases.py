"""Cases of the rules about sampling, servers, and models that transformers itself runs."""

R = "actor_rollout_ref.rollout"
M = "actor_rollout_ref.model"
BALANCED = "actor_rollout_ref.actor.router_aux_loss_coef=0.1"
RECORDED = f"{R}.enable_rollout_routing_replay=true"
URL = f"{R}.server_urls=[http://127.0.0.1:1]"
SERVER = (f"{R}.name=vllm", URL)
SPLIT = (f"{R}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2", "trainer.device=cuda")

SAMPLING_CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "R14": ((f"{R}.stop=['</answer>', '']",), (f"{R}.stop=['</answer>']",)),
    "R15": ((f"{R}.min_new_tokens=513",), (f"{R}.min_new_tokens=512",)),
    "R16": ((f"{R}.stop_token_ids=[128]",), (f"{R}.stop_token_ids=[127]",)),
    "R17": ((f"{R}.temperature=0", f"{R}.min_p=0.1"), (f"{R}.min_p=0.1",)),
    "R18": ((f"{R}.gpu_memory_utilization=0.6",), ()),
    "R19": (
        (f"{R}.name=hf", f"{R}.deterministic=false", "trainer.device=cuda"),
        (f"{R}.deterministic=false", "trainer.device=cuda"),
    ),
    "R21": ((*SERVER, f"{R}.top_p=0.9"), SERVER),
    "R22": ((*SERVER, "algorithm.rollout_correction.rollout_is=null"), SERVER),
    "R23": ((f"{R}.name=vllm",), SERVER),
    "R24": ((f"{R}.name=vllm", f"{R}.server_urls=[http://a, http://b]"), SERVER),
    "R25": ((URL,), SERVER),
    "R26": (
        (
            *SERVER,
            f"{M}.lora_rank=4",
            f"{R}.server.lora_format=adapter",
            f"{M}.target_modules=[lm_head]",
        ),
        (*SERVER, f"{M}.lora_rank=4", f"{R}.server.lora_format=adapter"),
    ),
    "R29": ((f"{R}.name=vllm", f"{R}.server_urls=['file:///rows']"), SERVER),
    "R27": ((f"{R}.name=openai", URL), SERVER),
    "R28": ((*SERVER, f"{R}.server.transport=transfer"), SERVER),
    "R30": (
        (f"{R}.name=vllm", *SPLIT),
        (*SERVER, *SPLIT),
    ),
    "M08": ((f"{M}.path=FALCON",), (f"{M}.path=FALCON", f"{R}.name=hf")),
    "M09": ((f"{M}.path=FALCON", f"{R}.name=hf"), ()),
    "M23": ((BALANCED,), (f"{M}.path=MIXTRAL", BALANCED)),
    "M24": ((RECORDED,), (f"{M}.path=MIXTRAL", RECORDED)),
    "M10": ((f"{M}.path=GPT2",), (f"{M}.path=GPT2", "data.max_response_length=100")),
}
