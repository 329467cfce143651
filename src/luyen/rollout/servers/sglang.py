"""SGLang: its HTTP protocol, and how its server is started.

Its log-probabilities are those of softmax(logits / temperature), the convention of this package.
Every reply names the version of the weights. It was tried against a server of our own tests that
implements the protocol, not against SGLang itself.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.lora import adapter_layers, adapter_rank
from luyen.models.policy import Policy
from luyen.rollout.native.sequences import Decode
from luyen.rollout.protocol import Ending, RolloutEngine, Sampling, rollout_engines
from luyen.rollout.servers.adapter import sends_adapter
from luyen.rollout.servers.build import ServerLaunch, ServerPlace, build_server_engine
from luyen.rollout.servers.dialect import (
    Generated,
    HttpCall,
    ServerFacts,
    ServerFault,
    TensorForm,
    WeightGroup,
    member,
    optional_count,
)

GROUP = "weight_update_group"
"""The process group over which a server receives weights."""
_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "aborted"}
_LOAD_S = 1800.0
"""Most seconds for loading weights."""
_MOST_SEED = 2**31
"""Seeds are numbers of 31 bits."""


@final
class SglangDialect:
    """Requests and replies of SGLang's server.

    With `can_sleep` the server was started with the memory saver. With `has_adapter` the weights
    are those of a LoRA adapter, which requests name; the version in replies is of those below.

    Example:
        >>> SglangDialect().abort(["luyen-1"])[0].body
        {'rid': 'luyen-1.'}
    """

    name = "sglang"

    def __init__(self, *, can_sleep: bool = False, has_adapter: bool = False) -> None:
        self._can_sleep = can_sleep
        self._has_adapter = has_adapter

    def refusal(self, sampling: Sampling) -> str | None:
        """None: its convention is ours."""
        del sampling
        return None

    def generate(
        self, id: str, tokens: Sequence[int], sampling: Sampling, *, seed: int, model: str | None
    ) -> HttpCall:
        """One sample; a server has one model, so that only an adapter's name is sent."""
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": seed % _MOST_SEED,
            "skip_special_tokens": False,
            # It switches every stop token off, also ours.
            "ignore_eos": sampling.ignore_stop or not sampling.stop_ids,
        }
        if not sampling.ignore_stop:
            parameters["stop_token_ids"] = sorted(sampling.stop_ids)
            if sampling.stop_strings:
                parameters["stop"] = list(sampling.stop_strings)
        body: dict[str, Any] = {
            "rid": _rid(id),
            "input_ids": list(tokens),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if self._has_adapter:
            body["lora_path"] = model
        return HttpCall(path="/generate", body=body)

    def generated(self, reply: Any) -> Generated:
        """The reply to one prompt and one sample, which is no list."""
        if isinstance(reply, list):
            count = len(cast(list[Any], reply))
            raise ServerFault("shape", f"{count} samples came as a list, and one was wanted")
        tokens = member(reply, "output_ids")
        scores = member(reply, "meta_info", "output_token_logprobs")
        if not isinstance(tokens, list) or not isinstance(scores, list):
            raise ServerFault("shape", "a reply has no token ids, or no log-probabilities")
        scored = tuple(member(score, 1) for score in cast(list[Any], scores))
        if scored != tuple(cast(list[int], tokens)):
            counts = f"{len(scored)} log-probabilities for {len(cast(list[int], tokens))} tokens"
            raise ServerFault("shape", f"{counts}, or they are of other tokens")
        reason = member(reply, "meta_info", "finish_reason", "type")
        if reason not in _ENDINGS:
            raise ServerFault("shape", f"it ended by {reason!r}")
        return Generated(
            tokens=scored,
            logps=tuple(member(score, 0) for score in cast(list[Any], scores)),
            reason=_ENDINGS[reason],
            version=None
            if self._has_adapter
            else str(member(reply, "meta_info", "weight_version")),
        )

    def health(self) -> HttpCall:
        """Success once the server has loaded its model."""
        return HttpCall(path="/health", method="GET", timeout_s=10.0)

    def facts(self) -> HttpCall:
        """Settings of the server."""
        return HttpCall(path="/server_info", method="GET", timeout_s=30.0)

    def read_facts(self, reply: Any) -> ServerFacts:
        """Path of the model it was started with, and its context where one was set."""
        return ServerFacts(
            model=str(member(reply, "model_path")),
            max_model_len=optional_count(member(reply, "context_length")),
        )

    def abort(self, ids: Sequence[str]) -> Sequence[HttpCall]:
        """One call each: a server takes one id, and stops all requests that begin with it."""
        return [
            HttpCall(path="/abort_request", body={"rid": _rid(id)}, timeout_s=30.0) for id in ids
        ]

    def pause(self) -> Sequence[HttpCall]:
        """Stop generating; loading weights flushes the cached keys."""
        return (HttpCall(path="/pause_generation", body={"mode": "abort"}),)

    def resume(self) -> Sequence[HttpCall]:
        """Generate again."""
        return (HttpCall(path="/continue_generation", body={}),)

    def sleep(self) -> Sequence[HttpCall]:
        """Give keys and values back; weights stay: what is released is lost."""
        body = {"tags": ["kv_cache"]}
        return (HttpCall(path="/release_memory_occupation", body=body),) if self._can_sleep else ()

    def wake(self) -> Sequence[HttpCall]:
        """Take the memory again."""
        body = {"tags": ["kv_cache"]}
        return (HttpCall(path="/resume_memory_occupation", body=body),) if self._can_sleep else ()

    def load_folder(self, folder: Path, version: int) -> Sequence[HttpCall]:
        """Load a folder and flush cached keys."""
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        return (HttpCall(path="/update_weights_from_disk", body=body, timeout_s=_LOAD_S),)

    def load_adapter(self, name: str, folder: Path) -> HttpCall | None:
        """By its path; cached keys belong to one load of an adapter."""
        body = {"lora_name": name, "lora_path": str(folder)}
        return HttpCall(path="/load_lora_adapter", body=body, timeout_s=_LOAD_S)

    def unload_adapter(self, name: str) -> HttpCall | None:
        """By its name."""
        return HttpCall(path="/unload_lora_adapter", body={"lora_name": name}, timeout_s=30.0)

    def join_group(self, group: WeightGroup) -> HttpCall | None:
        """All workers join, the first one as rank 1."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": GROUP,
            "backend": group.backend,
        }
        return HttpCall(path="/init_weights_update_group", body=body, timeout_s=group.timeout_s)

    def group_prefixes(self, backend: str) -> Sequence[str]:
        """Those of SGLang's own group, and of PyTorch for a group of this name and backend."""
        return (GROUP, f"{GROUP}/", "cuda/" if backend == "nccl" else "cpu/")

    def receive(self, tensors: Sequence[TensorForm], version: int) -> HttpCall:
        """Receive broadcasts of these tensors and load them."""
        body = {
            "names": [form.name for form in tensors],
            "dtypes": [form.dtype for form in tensors],
            "shapes": [list(form.shape) for form in tensors],
            "group_name": GROUP,
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        return HttpCall(path="/update_weights_from_distributed", body=body, timeout_s=_LOAD_S)

    def map_tensors(self, handles: Sequence[Sequence[Any]], version: int) -> HttpCall | None:
        """None: its route takes pickled tensors, which a server would have to trust."""
        del handles, version
        return None

    def digests(self) -> HttpCall | None:
        """None: its checksums are of fused tensors. A probe and the version prove its weights."""
        return None

    def read_digests(self, reply: Any) -> Mapping[str, str]:
        """There are none."""
        raise ServerFault("shape", f"unexpected digests: {str(reply)[:80]}")

    def weight_version(self) -> HttpCall | None:
        """Facts about the model, as it is now; the version of an adapter is in its name."""
        if self._has_adapter:
            return None
        return HttpCall(path="/model_info", method="GET", timeout_s=30.0)

    def read_weight_version(self, reply: Any) -> str:
        """The version that was sent with the weights."""
        return str(member(reply, "weight_version"))


def _rid(id: str) -> str:
    """An id that no other id begins with."""
    return f"{id}."


# How a server of ours is started.


def sglang_command(
    rollout: RolloutConfig,
    *,
    model: Path,
    port: int,
    max_model_len: int,
    dtype: str,
    device: str,
    lora_rank: int = 0,
    lora_layers: Sequence[str] = (),
) -> list[str]:
    """The command of a server; `rollout.engine_kwargs.sglang` comes last, so that it wins.

    With `lora_rank` it loads adapters of at most this rank, on layers of these names.
    """
    lora = {"enable_lora": True, "max_lora_rank": lora_rank, "lora_target_modules": [*lora_layers]}
    options: dict[str, Any] = {
        "model_path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "device": device,
        "random_seed": 0,
        "context_length": max_model_len,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "tp_size": rollout.tensor_model_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        # Without it, the server ignores the seeds of requests.
        "enable_deterministic_inference": rollout.deterministic,
        "disable_cuda_graph": rollout.enforce_eager,
        "enable_memory_saver": rollout.free_cache_engine,
        **(lora if lora_rank else {}),
        "disable_radix_cache": not rollout.enable_prefix_caching,
        **rollout.engine_kwargs.get("sglang", {}),
    }
    words = [rollout.server.python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        words += _option(name, value)
    return words


def _option(name: str, value: Any) -> list[str]:
    """An option as words; null and false leave it out: flags of SGLang are only ever switched on.

    Example:
        >>> _option("tp_size", 2), _option("disable_cuda_graph", False), _option("x", [1, 2])
        (['--tp-size', '2'], [], ['--x', '1', '2'])
    """
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, cast(list[Any], value))]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def sglang_launch(
    policy: Policy, rollout: RolloutConfig, *, max_model_len: int, place: ServerPlace
) -> ServerLaunch:
    """How a server of this policy is started."""
    dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
    layers = adapter_layers(policy.model) if sends_adapter(policy, rollout) else {}

    def command(port: int) -> list[str]:
        return sglang_command(
            rollout,
            model=place.model,
            port=port,
            max_model_len=max_model_len,
            dtype=dtype,
            device=policy.device.type,
            lora_rank=adapter_rank(policy.model) if layers else 0,
            lora_layers=sorted({name.rpartition(".")[2] for name in layers}),
        )

    # The variable would make it report log-probabilities before the temperature is applied.
    return ServerLaunch(
        command=command, environment=lambda: {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    )


@rollout_engines.register("sglang", splits=True, is_server=True)
def sglang(
    policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Decode, place: ServerPlace
) -> RolloutEngine:
    """An SGLang server that is started here, or that runs at one of `server_urls`."""
    longest = rollout.max_model_len or longest
    is_ours = not rollout.server_urls
    return build_server_engine(
        SglangDialect(
            can_sleep=is_ours and rollout.free_cache_engine,
            has_adapter=sends_adapter(policy, rollout),
        ),
        launch=sglang_launch(policy, rollout, max_model_len=longest, place=place),
        policy=policy,
        rollout=rollout,
        max_model_len=longest,
        decode=decode,
        place=place,
    )
