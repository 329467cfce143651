"""A server that speaks SGLang's HTTP protocol over the embedded engine.

Faithful to it are: routes and reply shapes, defaults (`max_new_tokens` 128), finish reasons as
dicts, log-probabilities of softmax(logits / temperature) before top-k and top-p and after the ban
of stop tokens, `ignore_eos` that switches every stop token off, a length that is reported before a
stop, ids of requests with n > 1 that are replaced, seeds that count in deterministic mode alone,
pause modes, LoRA adapters that are loaded by path and named by requests, and refusals. Not there:
text prompts, streams, grammars, pictures. With several truncations at once the engine's own order
holds.
"""

import argparse
import base64
import io
import json
import os
import pickle
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.base.errors import UserError
from luyen.rollout.protocol import Sampling
from tests.peers.adapters import Adapters
from tests.peers.driver import EngineDriver, Pause, Sample, WeightsRefused, read_folder
from tests.peers.groups import WeightGroup, unflatten
from tests.peers.http import Call, FaultName, Faults, JsonServer, Refusal, Route
from tests.peers.models import open_driver

_PARAMETERS = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
    "stop": None,
    "stop_token_ids": None,
    "sampling_seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}
"""Sampling parameters that are understood, and their defaults."""
_PAUSES: Mapping[str, Pause] = {"abort": "abort", "retract": "recompute", "in_place": "freeze"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """One prompt of a /generate call."""

    rid: str
    tokens: tuple[int, ...]
    parameters: dict[str, Any]
    sampling: Sampling
    keys: tuple[int, ...]


@final
class SglangPeer:
    """The routes, and the driver behind them."""

    def __init__(
        self,
        driver: EngineDriver,
        *,
        is_deterministic: bool = False,
        has_memory_saver: bool = False,
        original_logprobs: bool = False,
        max_lora_rank: int = 0,
    ) -> None:
        """`max_lora_rank` above 0: LoRA is on."""
        self.driver = driver
        self.adapters = Adapters(driver, max_rank=max_lora_rank)
        self._has_lora = max_lora_rank > 0
        self._is_deterministic = is_deterministic
        self._has_memory_saver = has_memory_saver
        self._original = original_logprobs
        self._released: set[str] = set()
        self._groups: dict[str, WeightGroup] = {}
        self.faults = Faults.from_environment()

    def serve(self, port: int = 0) -> JsonServer:
        """Listen."""
        return JsonServer(self.routes(), spoil=spoil, faults=self.faults, port=port)

    def routes(self) -> dict[str, Route]:
        """By method and path."""
        return {
            "POST /generate": self.generate,
            "POST /abort_request": self.abort_request,
            "POST /pause_generation": self.pause_generation,
            "POST /continue_generation": self.continue_generation,
            "GET /flush_cache": self.flush_cache,
            "POST /flush_cache": self.flush_cache,
            "POST /update_weights_from_disk": self.update_weights_from_disk,
            "POST /update_weights_from_tensor": self.update_weights_from_tensor,
            "POST /load_lora_adapter": self.load_lora_adapter,
            "POST /unload_lora_adapter": self.unload_lora_adapter,
            "POST /init_weights_update_group": self.init_weights_update_group,
            "POST /update_weights_from_distributed": self.update_weights_from_distributed,
            "POST /destroy_weights_update_group": self.destroy_weights_update_group,
            "POST /update_weight_version": self.update_weight_version,
            "GET /model_info": self.model_info,
            "GET /get_model_info": self.model_info,
            "GET /weights_checker": self.weights_checker,
            "POST /weights_checker": self.weights_checker,
            "POST /release_memory_occupation": self.release_memory_occupation,
            "POST /resume_memory_occupation": self.resume_memory_occupation,
            "GET /health": lambda _call: "",
            "GET /health_generate": lambda _call: "",
            "GET /server_info": self.server_info,
            "GET /get_server_info": self.server_info,
        }

    # Generation.

    def generate(self, call: Call) -> Any:
        """One reply, or a list of them for several prompts or samples, prompt-major."""
        body = call.body
        ids = body.get("input_ids")
        if ids is None:
            raise _bad("Either text, input_ids or input_embeds should be provided.")
        if body.get("stream"):
            raise Refusal(501, {"error": {"message": "this server does not stream"}})
        if self.adapters.driver(body.get("lora_path")) is None:
            loaded = sorted(self.adapters.paths)
            raise _bad(f"LoRA adapter not loaded: {body['lora_path']}. Loaded: {loaded}")
        if self._released:
            raise Refusal(500, {"error": {"message": f"released: {sorted(self._released)}"}})
        is_batch = bool(ids) and isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        wanted = [self._read(body, prompts, index) for index in range(len(prompts))]
        has_list = is_batch or any(len(one.keys) > 1 for one in wanted)
        replies = [reply for one in wanted for reply in self._replies(one, body)]
        return replies if has_list else replies[0]

    def _read(self, body: dict[str, Any], prompts: list[Any], index: int) -> _Wanted:
        given = body.get("sampling_params") or {}
        given = given[index] if isinstance(given, list) else given
        unknown = sorted(set(given) - set(_PARAMETERS))
        if unknown:
            raise _bad(f"Unexpected keyword argument '{unknown[0]}'")
        parameters = {**_PARAMETERS, **given}
        rid = body.get("rid")
        rid = rid[index] if isinstance(rid, list) else rid
        if rid is None or parameters["n"] > 1:  # the ids of parallel samples are made by the server
            rid = secrets.token_hex(16)
        seed, keys = parameters["sampling_seed"], []
        for _ in range(parameters["n"]):
            fixed = seed is not None and self._is_deterministic
            keys.append(seed % 2**64 if fixed else secrets.randbits(64))
        return _Wanted(
            rid=rid,
            tokens=tuple(prompts[index]),
            parameters=parameters,
            sampling=self._sampling(parameters, len(prompts[index])),
            keys=tuple(keys),
        )

    def _sampling(self, given: dict[str, Any], prompt: int) -> Sampling:
        if prompt == 0:
            raise _bad("input_ids cannot be empty.")
        if given["temperature"] < 0:
            raise _bad(f"temperature must be non-negative, got {given['temperature']}.")
        if not 0 < given["top_p"] <= 1:
            raise _bad(f"top_p must be in (0, 1], got {given['top_p']}.")
        if given["top_k"] == 0 or given["top_k"] < -1:
            raise _bad(f"top_k must be -1 (disable), or at least 1, got {given['top_k']}.")
        if not 0 <= given["min_p"] <= 1:
            raise _bad(f"min_p must be in [0, 1], got {given['min_p']}.")
        if not 0 <= given["min_new_tokens"] <= given["max_new_tokens"]:
            raise _bad(f"min_new_tokens must be in [0, max_new_tokens({given['max_new_tokens']})]")
        if prompt >= self.driver.longest:
            raise _bad(f"The input ({prompt} tokens) is longer than the model's context length")
        stops = frozenset(given["stop_token_ids"] or ()) | self.driver.eos_ids
        stop = given["stop"] or ()
        return Sampling(
            max_new_tokens=min(given["max_new_tokens"], self.driver.longest - prompt),
            temperature=given["temperature"],
            top_k=given["top_k"],
            top_p=given["top_p"],
            min_p=given["min_p"],
            min_new_tokens=given["min_new_tokens"],
            stop_ids=frozenset() if given["ignore_eos"] else stops,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        )

    def _replies(self, wanted: _Wanted, body: dict[str, Any]) -> list[dict[str, Any]]:
        rule = "raw" if self._original else "barred" if wanted.sampling.barred_ids else "full"
        began = time.monotonic()
        driver = self.adapters.driver(body.get("lora_path"))
        assert driver is not None, "unknown adapters were refused"
        try:
            samples = driver.generate(
                wanted.tokens, wanted.keys, wanted.sampling, rid=wanted.rid, rule=rule
            )
        except UserError as refusal:
            raise _bad(str(refusal)) from refusal
        is_scored = bool(body.get("return_logprob"))
        has_text = bool(body.get("return_text_in_logprobs"))
        return [
            self._reply(wanted, sample, is_scored, has_text, time.monotonic() - began)
            for sample in samples
        ]

    def _reply(
        self, wanted: _Wanted, sample: Sample, is_scored: bool, has_text: bool, took: float
    ) -> dict[str, Any]:
        text = self.driver.decode(sample.tokens)
        reason = self._reason(wanted.sampling, sample, text)
        matched = reason.get("matched")
        if isinstance(matched, str) and not wanted.parameters["no_stop_trim"]:
            text = text[: text.rfind(matched)]
        meta: dict[str, Any] = {
            "id": wanted.rid,
            "finish_reason": reason,
            "prompt_tokens": len(wanted.tokens),
            "weight_version": sample.version,
            "num_retractions": 0,
            "completion_tokens": len(sample.tokens),
            "cached_tokens": 0,
            "e2e_latency": took,
        }
        if is_scored:
            pieces = [self.driver.decode([t]) if has_text else None for t in sample.tokens]
            columns = zip(sample.logps, sample.tokens, pieces, strict=True)
            meta["output_token_logprobs"] = [list(column) for column in columns]
            meta["input_token_logprobs"] = []
        return {"text": text, "output_ids": list(sample.tokens), "meta_info": meta}

    def _reason(self, sampling: Sampling, sample: Sample, text: str) -> dict[str, Any]:
        """The length is looked at first, then tokens, then strings."""
        if sample.reason == "aborted":
            message = "Abort in waiting queue" if not sample.tokens else "Aborted"
            return {"type": "abort", "message": message, "status_code": None, "err_type": None}
        if len(sample.tokens) >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        if sample.tokens[-1] in sampling.stop_ids:
            return {"type": "stop", "matched": sample.tokens[-1]}
        return {"type": "stop", "matched": next(s for s in sampling.stop_strings if s in text)}

    # Control.

    def abort_request(self, call: Call) -> str:
        """Ends requests whose id begins with `rid`; their callers get what there is."""
        rid, is_all = call.body.get("rid") or "", bool(call.body.get("abort_all"))
        if is_all or rid:
            self.adapters.each(
                lambda driver: driver.abort(lambda other: is_all or other.startswith(rid))
            )
        return ""

    def pause_generation(self, call: Call) -> Any:
        """Stop; what becomes of running requests is the mode's choice."""
        mode = call.body.get("mode", "abort")
        if mode not in _PAUSES:
            raise _bad(f"mode must be one of {sorted(_PAUSES)}, got {mode!r}")
        self.adapters.each(lambda driver: driver.pause(_PAUSES[mode]))
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, call: Call) -> Any:
        """Go on."""
        self.adapters.each(lambda driver: driver.resume())
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush_cache(self, call: Call) -> str:
        """Refused while requests run or wait."""
        if self.driver.is_busy:
            raise Refusal(400, "Flush cache failed.")
        return "Cache flushed.\nPlease check backend logs for more details."

    def release_memory_occupation(self, call: Call) -> None:
        """Needs the memory saver, and an idle engine."""
        if not self._has_memory_saver:
            raise Refusal(500, {"error": {"message": "needs --enable-memory-saver"}})
        if self.driver.is_busy:
            raise Refusal(500, {"error": {"message": "requests are still running"}})
        self._released |= set(call.body.get("tags") or ("weights", "kv_cache"))

    def resume_memory_occupation(self, call: Call) -> None:
        """The weights come back as they are; real servers may need a publication."""
        if not self._has_memory_saver:
            raise Refusal(500, {"error": {"message": "needs --enable-memory-saver"}})
        self._released -= set(call.body.get("tags") or ("weights", "kv_cache"))

    # Weights.

    def load_lora_adapter(self, call: Call) -> Any:
        """Requests may name the adapter from now on; a name that is taken is refused."""
        name, folder = self._required(call, "lora_name"), self._required(call, "lora_path")
        if not self._has_lora:
            raise Refusal(
                400, self._adapter_reply("LoRA is not enabled. Please set `--enable-lora`.")
            )
        if name in self.adapters.paths:
            raise Refusal(400, self._adapter_reply(f"LoRA adapter {name} is already loaded"))
        try:
            if self.faults.take(call.path, "deaf") is not None:
                self.adapters.alias(name, folder)
            else:
                self.adapters.load(name, folder)
        except WeightsRefused as refusal:
            raise Refusal(400, self._adapter_reply(str(refusal))) from refusal
        return self._adapter_reply("")

    def unload_lora_adapter(self, call: Call) -> Any:
        """Forget an adapter."""
        name = self._required(call, "lora_name")
        if not self.adapters.unload(name):
            raise Refusal(400, self._adapter_reply(f"LoRA adapter {name} is not loaded"))
        return self._adapter_reply("")

    def _adapter_reply(self, error: str) -> dict[str, Any]:
        loaded = self.adapters.paths
        return {"success": not error, "error_message": error, "loaded_adapters": loaded}

    def update_weights_from_disk(self, call: Call) -> Any:
        """Weights of a folder; without a pause, after the running requests have ended."""
        folder = self._required(call, "model_path")
        reply = self._load(call, lambda: read_folder(folder))
        self.driver.folder = folder
        return {**reply, "num_paused_requests": 0}

    def update_weights_from_tensor(self, call: Call) -> Any:
        """Pickled tensors, as SGLang takes them: for tests alone, pickles run code."""
        payload = self._required(call, "serialized_named_tensors")
        raw = pickle.load(io.BytesIO(base64.b64decode(payload[0])))
        if call.body.get("load_format") == "flattened_bucket":
            raw = unflatten(raw["flattened_tensor"], raw["metadata"])
        return self._load(call, lambda: dict(raw))

    def init_weights_update_group(self, call: Call) -> Any:
        """Join a process group as the rank that follows the trainer."""
        name = call.body.get("group_name", "weight_update_group")
        try:
            self._groups[name] = WeightGroup(
                address=self._required(call, "master_address"),
                port=self._required(call, "master_port"),
                rank=self._required(call, "rank_offset"),
                world_size=self._required(call, "world_size"),
                name=name,
                backend=call.body.get("backend", "nccl"),
            )
        except (RuntimeError, ValueError, dist.DistError) as fault:
            raise Refusal(400, {"success": False, "message": str(fault)}) from fault
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def update_weights_from_distributed(self, call: Call) -> Any:
        """Receive tensors of these names by broadcast."""
        names, dtypes = self._required(call, "names"), self._required(call, "dtypes")
        shapes = self._required(call, "shapes")
        group = self._groups.get(call.body.get("group_name", "weight_update_group"))
        if group is None:
            raise Refusal(400, {"success": False, "message": "Group not in model update groups"})
        forms = list(zip(names, dtypes, shapes, strict=True))
        return self._load(call, lambda: group.receive(forms))

    def destroy_weights_update_group(self, call: Call) -> Any:
        """Leave the group."""
        group = self._groups.pop(call.body.get("group_name", "weight_update_group"), None)
        if group is None:
            raise Refusal(400, {"success": False, "message": "The group does not exist."})
        group.close()
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def update_weight_version(self, call: Call) -> Any:
        """Name the weights."""
        version = self._required(call, "new_version")
        if call.body.get("abort_all_requests", True):
            self.driver.abort(lambda _: True)
        self.driver.set_version(version)
        return {"success": True, "message": "Weight version updated", "new_version": version}

    def _load(self, call: Call, read: Any) -> dict[str, Any]:
        """Read weights and load them, after a drain unless generation is paused."""
        if call.body.get("abort_all_requests"):
            self.driver.abort(lambda _: True)
        is_paused = self.driver.is_paused
        if is_paused and self.driver.is_frozen and call.body.get("flush_cache", True):
            message = "Cache flush failed after updating weights"
            raise Refusal(400, {"success": False, "message": message})
        try:
            weights: Mapping[str, Tensor] = read()
            if self.faults.take(call.path, "deaf") is None:
                version = call.body.get("weight_version")
                self.driver.load(weights, version, drains=not is_paused)
            elif call.body.get("weight_version") is not None:
                self.driver.set_version(call.body["weight_version"])
        except WeightsRefused as refusal:
            raise Refusal(400, {"success": False, "message": str(refusal)}) from refusal
        return {"success": True, "message": "Succeeded to update model weights."}

    # Facts.

    def model_info(self, call: Call) -> Any:
        """What is served."""
        return {
            "model_path": self.driver.folder,
            "tokenizer_path": self.driver.folder,
            "is_generation": True,
            "weight_version": self.driver.version,
            "preferred_sampling_params": None,
        }

    def server_info(self, call: Call) -> Any:
        """Settings of the server."""
        return {
            "model_path": self.driver.folder,
            "version": "0.5.18",
            "tp_size": 1,
            "context_length": self.driver.longest,
            "enable_deterministic_inference": self._is_deterministic,
            "enable_memory_saver": self._has_memory_saver,
            "weight_version": self.driver.version,
        }

    def weights_checker(self, call: Call) -> Any:
        """Digests of the parameters."""
        if call.body.get("action") != "checksum":
            raise _bad(f"Unsupported action {call.body.get('action')!r}")
        sums = self.driver.checksums()
        ranks = [{"parallelism_info": {"tp_rank": 0}, "checksums": sums}]
        return {"success": True, "message": "Success.", "ranks": ranks}

    @staticmethod
    def _required(call: Call, name: str) -> Any:
        if name not in call.body:
            raise _bad(f"Field required: {name}")
        return call.body[name]


def _bad(message: str) -> Refusal:
    return Refusal(400, {"error": {"message": message}})


def spoil(fault: FaultName, body: Any) -> Any:
    """An answer with this fault."""
    if isinstance(body, list):
        if fault == "fewer":
            return body[:-1]
        return [spoil(fault, body[0]), *body[1:]]
    if not isinstance(body, dict):
        return body
    body = json.loads(json.dumps(body))
    if fault == "other_model" and "model_path" in body:
        return {**body, "model_path": "/another/model"}
    if fault == "old_version":
        if "weight_version" in body:
            return {**body, "weight_version": "default"}
        if "meta_info" in body:
            body["meta_info"]["weight_version"] = "default"
    if fault == "fewer":
        return []
    scores = body.get("meta_info", {}).get("output_token_logprobs")
    if scores and fault == "tokens":
        scores.pop()
    elif scores and fault in ("nan", "null"):
        scores[-1][0] = float("nan") if fault == "nan" else None
    return body


def main() -> None:
    """Serve a model's folder until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=64)
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    driver = open_driver(given.model_path, longest=given.context_length)
    peer = SglangPeer(
        driver,
        is_deterministic=given.enable_deterministic_inference,
        has_memory_saver=given.enable_memory_saver,
        original_logprobs=os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") == "1",
        max_lora_rank=given.max_lora_rank if given.enable_lora else 0,
    )
    peer.serve(given.port).wait()


if __name__ == "__main__":
    main()
