"""vLLM: its HTTP protocol, and how its server is started.

Generation uses the completions route, which every release has: token ids in, token ids and
log-probabilities out. Control routes need `VLLM_SERVER_DEV_MODE=1`. The server reports the
log-probabilities of the distribution that it samples from (`--logprobs-mode processed_logprobs`):
without top-k, top-p and min-p this is the temperature-scaled full softmax.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.lora import adapter_rank
from luyen.models.policy import Policy
from luyen.rollout.native.sequences import Decode
from luyen.rollout.protocol import Ending, RolloutEngine, Sampling, rollout_engines
from luyen.rollout.servers import vllm_worker
from luyen.rollout.servers.adapter import sends_adapter
from luyen.rollout.servers.build import ServerLaunch, ServerPlace, build_server_engine
from luyen.rollout.servers.connection import ServerConnection
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
from luyen.rollout.servers.process import Server, local_address
from luyen.rollout.servers.weights import TRANSFER, TransferTransport

MODEL = "policy"
"""The name that a server of ours serves the policy under."""
_MODULE = "luyen_vllm_worker"
_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "aborted"}
_LOAD_S = 1800.0
"""Most seconds for loading weights."""


@final
class VllmDialect:
    """Requests and replies of vLLM's server.

    With `has_extension` the server was started with our worker extension, which loads weights and
    digests them; without it, weights come from folders by `reload_weights`. With `has_adapter` the
    weights are those of a LoRA adapter, which replies name as the model. With `has_transfer` vLLM's
    own transfer engine loads weights, and nothing digests them.
    """

    name = "vllm"

    def __init__(
        self,
        *,
        has_extension: bool,
        can_sleep: bool = False,
        has_adapter: bool = False,
        has_transfer: bool = False,
    ) -> None:
        self._has_extension = has_extension
        self._has_adapter = has_adapter
        self._has_transfer = has_transfer
        self._can_sleep = can_sleep

    def refusal(self, sampling: Sampling) -> str | None:
        """None: log-probabilities are those of what is sampled from."""
        del sampling
        return None

    def generate(
        self, id: str, tokens: Sequence[int], sampling: Sampling, *, seed: int, model: str | None
    ) -> HttpCall:
        """One sample by the completions route."""
        body: dict[str, Any] = {
            "request_id": id,
            "model": model,
            "prompt": list(tokens),
            "n": 1,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            # What ends an answer is decided here; the model's own stop tokens are among our ids.
            "ignore_eos": True,
        }
        if not sampling.ignore_stop:
            body["stop_token_ids"] = sorted(sampling.stop_ids)
            if sampling.stop_strings:
                body["stop"] = list(sampling.stop_strings)
        return HttpCall(path="/v1/completions", body=body)

    def generated(self, reply: Any) -> Generated:
        """The only choice of a completion."""
        choices = member(reply, "choices")
        if not isinstance(choices, list) or len(cast(list[Any], choices)) != 1:
            raise ServerFault("shape", f"{len(choices)} samples came, and one was wanted")
        tokens, logps = member(reply, "choices", 0, "token_ids"), ()
        if member(reply, "choices", 0, "logprobs") is not None:
            logps = member(reply, "choices", 0, "logprobs", "token_logprobs")
        if not isinstance(tokens, list) or not isinstance(logps, list | tuple):
            raise ServerFault("shape", "a choice has no token ids, or no log-probabilities")
        reason = member(reply, "choices", 0, "finish_reason")
        if reason not in _ENDINGS:
            raise ServerFault("shape", f"it ended by {reason!r}")
        return Generated(
            tokens=tuple(cast(list[int], tokens)),
            logps=tuple(cast(list[float | None], logps)),
            reason=_ENDINGS[reason],
            model=str(member(reply, "model")),
        )

    def health(self) -> HttpCall:
        """Success once the engine runs."""
        return HttpCall(path="/health", method="GET", timeout_s=10.0)

    def facts(self) -> HttpCall:
        """The list of models."""
        return HttpCall(path="/v1/models", method="GET", timeout_s=30.0)

    def read_facts(self, reply: Any) -> ServerFacts:
        """The first model of the list."""
        first = member(reply, "data", 0)
        return ServerFacts(
            model=str(member(first, "id")),
            max_model_len=optional_count(member(first, "max_model_len")),
        )

    def abort(self, ids: Sequence[str]) -> Sequence[HttpCall]:
        """Stop completions; they are numbered inside their request."""
        names = [f"cmpl-{id}-0" for id in ids]
        return (HttpCall(path="/abort_requests", body={"request_ids": names}, timeout_s=30.0),)

    def pause(self) -> Sequence[HttpCall]:
        """Stop generating, and drop cached keys."""
        return (HttpCall(path="/pause?mode=abort&clear_cache=true"),)

    def resume(self) -> Sequence[HttpCall]:
        """Drop the prefix cache, and generate again."""
        return (HttpCall(path="/reset_prefix_cache"), HttpCall(path="/resume"))

    def sleep(self) -> Sequence[HttpCall]:
        """Weights to the host, keys and values dropped."""
        return (HttpCall(path="/sleep?level=1&mode=abort"),) if self._can_sleep else ()

    def wake(self) -> Sequence[HttpCall]:
        """Everything back on the device."""
        return (HttpCall(path="/wake_up"),) if self._can_sleep else ()

    def load_folder(self, folder: Path, version: int) -> Sequence[HttpCall]:
        """By our extension, or by vLLM's own reload, which does not know versions."""
        if self._has_extension:
            return (_rpc("luyen_load_folder", str(folder), version),)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return (
            HttpCall(path="/collective_rpc", body=body, timeout_s=_LOAD_S),
            HttpCall(path="/update_weight_version", body={"new_version": str(version)}),
        )

    def load_adapter(self, name: str, folder: Path) -> HttpCall | None:
        """By its path; the server caches keys by name and path, so that none outlive a version."""
        body = {"lora_name": name, "lora_path": str(folder)}
        return HttpCall(path="/v1/load_lora_adapter", body=body, timeout_s=_LOAD_S)

    def unload_adapter(self, name: str) -> HttpCall | None:
        """By its name."""
        return HttpCall(path="/v1/unload_lora_adapter", body={"lora_name": name}, timeout_s=30.0)

    def join_group(self, group: WeightGroup) -> HttpCall | None:
        """By our extension."""
        if not self._has_extension:
            return None
        address, port, size = group.address, group.port, group.size
        return _rpc("luyen_join_group", address, port, size, group.backend, group.timeout_s)

    def group_prefixes(self, backend: str) -> Sequence[str]:
        """Those of our extension."""
        del backend
        return (vllm_worker.PREFIX,)

    def receive(self, tensors: Sequence[TensorForm], version: int) -> HttpCall:
        """By our extension."""
        forms = [[form.name, form.dtype, list(form.shape)] for form in tensors]
        return _rpc("luyen_receive", forms, version)

    def map_tensors(self, handles: Sequence[Sequence[Any]], version: int) -> HttpCall | None:
        """By our extension."""
        return _rpc("luyen_map", list(handles), version) if self._has_extension else None

    def digests(self) -> HttpCall | None:
        """By our extension."""
        has_digests = self._has_extension and not (self._has_adapter or self._has_transfer)
        return _rpc("luyen_digests") if has_digests else None

    def read_digests(self, reply: Any) -> Mapping[str, str]:
        """Digests on which all workers agree."""
        first, *rest = cast(list[dict[str, str]], member(reply, "results"))
        return {name: text for name, text in first.items() if all(r[name] == text for r in rest)}

    def weight_version(self) -> HttpCall | None:
        """By our extension, or as vLLM counts them; the version of an adapter is in its name."""
        if self._has_adapter:
            return None
        if self._has_extension:
            return _rpc("luyen_weight_version")
        return HttpCall(path="/weight_info", method="GET")

    def read_weight_version(self, reply: Any) -> str:
        """The version of all workers."""
        if not self._has_extension:
            return str(member(reply, "weight_version"))
        versions = {str(member(one, "version")) for one in member(reply, "results")}
        return versions.pop() if len(versions) == 1 else "mixed"


def _rpc(method: str, *args: Any) -> HttpCall:
    body = {"method": method, "args": list(args)}
    return HttpCall(path="/collective_rpc", body=body, timeout_s=_LOAD_S)


# How a server of ours is started.


_CPU_OPTIONS = {"enable_chunked_prefill": False, "enforce_eager": True, "enable_sleep_mode": None}
"""On CPUs a seeded request whose prompt is read in parts ends vLLM 0.32 ("CPU Generator does not
use offset"), compiling takes longer than small models run, and there is no sleep mode."""


def vllm_command(
    rollout: RolloutConfig,
    *,
    model: Path,
    port: int,
    max_model_len: int,
    dtype: str,
    is_cpu: bool,
    lora_rank: int = 0,
) -> list[str]:
    """The command of a server; `rollout.engine_kwargs.vllm` comes last, so that it wins.

    With `lora_rank` it loads adapters of at most this rank.
    """
    options: dict[str, Any] = {
        "model": str(model),
        "served_model_name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_expert_parallel": True if (rollout.expert_parallel_size or 1) > 1 else None,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": f"{_MODULE}.WeightExtension",
        "enforce_eager": True if rollout.enforce_eager else None,
        "enable_sleep_mode": True if rollout.free_cache_engine else None,
        "weight_transfer_config": TRANSFER if rollout.server.transport == "transfer" else None,
        **({"enable_lora": True, "max_lora_rank": _rank_limit(lora_rank)} if lora_rank else {}),
        "enable_prefix_caching": None if rollout.enable_prefix_caching else False,
        **(_CPU_OPTIONS if is_cpu else {}),
        **rollout.engine_kwargs.get("vllm", {}),
    }
    words = [rollout.server.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        words += _option(name, value)
    return words


_RANK_LIMITS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`."""


def _rank_limit(rank: int) -> int:
    """The smallest limit that an adapter of this rank is within; the server has no other ones.

    Example:
        >>> _rank_limit(4), _rank_limit(48)
        (8, 64)
    """
    return next((limit for limit in _RANK_LIMITS if limit >= rank), rank)


def _option(name: str, value: Any) -> list[str]:
    """An option as words; null leaves it out, so that vLLM's own default holds.

    Example:
        >>> _option("max_num_seqs", 8), _option("enforce_eager", True), _option("seed", None)
        (['--max-num-seqs', '8'], ['--enforce-eager'], [])
    """
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, list | dict) else str(value)]


def vllm_launch(
    policy: Policy, rollout: RolloutConfig, *, max_model_len: int, place: ServerPlace
) -> ServerLaunch:
    """How a server of this policy is started."""
    dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")

    is_cpu = policy.device.type == "cpu"

    def command(port: int) -> list[str]:
        return vllm_command(
            rollout,
            model=place.model,
            port=port,
            max_model_len=max_model_len,
            dtype=dtype,
            is_cpu=is_cpu,
            lora_rank=adapter_rank(policy.model) if sends_adapter(policy, rollout) else 0,
        )

    # Triton multiplies fp32 in TF32 by default, which moves log-probabilities by up to 0.01.
    more = {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" and not is_cpu else {}
    return ServerLaunch(
        command=command, environment=lambda: more | vllm_environment(place.folder, is_cpu)
    )


def vllm_environment(folder: Path, is_cpu: bool) -> dict[str, str]:
    """Environment of a server; puts our worker extension into `folder`, on its path.

    What the user has set for the CPU build stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(vllm_worker.__file__, folder / f"{_MODULE}.py")
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    cpu = {name: os.environ.get(name, value) for name, value in usual.items()} if is_cpu else {}
    return {
        **cpu,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(folder.absolute()),
    }


@rollout_engines.register("vllm", splits=True, is_server=True)
def vllm(
    policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Decode, place: ServerPlace
) -> RolloutEngine:
    """A vLLM server that is started here, or that runs at one of `server_urls`."""
    is_ours = not rollout.server_urls
    has_adapter = sends_adapter(policy, rollout)
    has_transfer = rollout.server.transport == "transfer" and not has_adapter
    dialect = VllmDialect(
        has_extension=is_ours,
        can_sleep=is_ours and rollout.free_cache_engine and policy.device.type != "cpu",
        has_adapter=has_adapter,
        has_transfer=has_transfer,
    )
    longest = rollout.max_model_len or longest

    def transfer(server: Server, connection: ServerConnection) -> TransferTransport:
        return TransferTransport(
            connection,
            workers=rollout.tensor_model_parallel_size,
            device=policy.device,
            address=local_address(server.url),
            note_version=(lambda n: _rpc("luyen_note_version", n)) if is_ours else None,
        )

    return build_server_engine(
        dialect,
        launch=vllm_launch(policy, rollout, max_model_len=longest, place=place),
        policy=policy,
        rollout=rollout,
        max_model_len=longest,
        decode=decode,
        place=place,
        make_transport=transfer if has_transfer else None,
    )
