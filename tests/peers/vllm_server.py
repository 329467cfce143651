"""A server that speaks vLLM's HTTP protocol over the embedded engine.

Faithful to it are: `/v1/completions` and `/inference/v1/generate` with token ids in and out, the
default of 16 tokens for the former, `logprobs_mode` (raw by default: neither temperature nor
truncation), -9999.0 for minus infinity, seeds that count up over n samples, the stop tokens of the
model's own files unless `ignore_eos`, pause modes, control routes in development mode alone, LoRA
adapters that are loaded by path, and refusals. Not there: text prompts, streams, grammars, chat.
Weights arrive by `reload_weights` or through a worker extension.
"""

import argparse
import importlib
import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal, cast, final

import torch

from luyen.base.errors import UserError
from luyen.rollout.protocol import Sampling
from tests.peers.adapters import Adapters
from tests.peers.driver import (
    Convention,
    EngineDriver,
    Pause,
    Sample,
    WeightsRefused,
    read_folder,
)
from tests.peers.http import Call, FaultName, Faults, JsonServer, Refusal, Route
from tests.peers.models import open_driver
from tests.peers.vllm_worker import make_worker

Mode = Literal["raw_logprobs", "processed_logprobs"]
_CLAMP = -9999.0
_PARAMETERS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": None,
}
"""Sampling parameters that are understood, and their defaults; `max_tokens` has one per route."""
_EXTRAS = {
    "model",
    "prompt",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "add_special_tokens",
    "detokenize",
    "max_tokens",
    "request_id",
    "stream",
    "echo",
    "priority",
    "cache_salt",
    "user",
    "flat_logprobs",
    "output_kind",
}
_PAUSES: Mapping[str, Pause] = {"abort": "abort", "wait": "wait", "keep": "recompute"}


@final
class VllmPeer:
    """The routes, and the driver behind them."""

    def __init__(
        self,
        driver: EngineDriver,
        *,
        mode: Mode = "raw_logprobs",
        is_dev_mode: bool = False,
        name: str | None = None,
        has_sleep_mode: bool = False,
        extension: str | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """`max_lora_rank` above 0: LoRA is on, and adapters may be loaded while it runs."""
        self.driver = driver
        self.adapters = Adapters(driver, max_rank=max_lora_rank)
        self._has_lora = max_lora_rank > 0
        self._mode: Mode = mode
        self._is_dev_mode = is_dev_mode
        self._name = name or driver.folder
        self._has_sleep_mode = has_sleep_mode
        self._asleep: set[str] = set()
        self.faults = Faults.from_environment()
        found: Any = None
        if extension is not None:
            module, _, attribute = extension.rpartition(".")
            found = getattr(importlib.import_module(module), attribute)
        self._worker = make_worker(driver, found, reload=self._reload_folder)

    def serve(self, port: int = 0) -> JsonServer:
        """Listen."""
        return JsonServer(self.routes(), spoil=spoil, faults=self.faults, port=port)

    def routes(self) -> dict[str, Route]:
        """By method and path; those of development mode only in it."""
        plain: dict[str, Route] = {
            "POST /v1/completions": self.completions,
            "POST /inference/v1/generate": self.inference_generate,
            "GET /health": lambda _call: "",
            "GET /ping": lambda _call: "",
            "GET /version": lambda _call: {"version": "0.32.0"},
            "GET /v1/models": self.models,
        }
        control: dict[str, Route] = {
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "GET /is_paused": lambda _call: {"is_paused": self.driver.is_paused},
            "POST /abort_requests": self.abort_requests,
            "POST /collective_rpc": self.collective_rpc,
            "GET /get_world_size": lambda _call: {"world_size": 1},
            "POST /reset_prefix_cache": lambda _call: {"success": not self.driver.is_busy},
            "POST /update_weight_version": self.update_weight_version,
            "GET /weight_info": lambda _call: {"weight_version": self.driver.version},
        }
        if self._has_sleep_mode:
            control["POST /sleep"] = self.sleep
            control["POST /wake_up"] = self.wake_up
            control["GET /is_sleeping"] = lambda _call: {"is_sleeping": bool(self._asleep)}
        if self._has_lora:
            plain["POST /v1/load_lora_adapter"] = self.load_lora_adapter
            plain["POST /v1/unload_lora_adapter"] = self.unload_lora_adapter
        return {**plain, **(control if self._is_dev_mode else {})}

    # Generation.

    def completions(self, call: Call) -> Any:
        """OpenAI's completions, with token ids."""
        body = call.body
        prompt = body.get("prompt")
        if prompt is None:
            raise _bad("prompt: Field required")
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)):
            raise Refusal(501, {"error": {"message": "this server takes token ids"}})
        self._refuse_other_names(body)
        prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
        name = f"cmpl-{body.get('request_id') or secrets.token_hex(8)}"
        choices = []
        for index, tokens in enumerate(prompts):
            sampling = self._sampling(body, len(tokens), int(body.get("max_tokens") or 16))
            for sample in self._samples(tokens, body, sampling, f"{name}-{index}"):
                choices.append(self._choice(len(choices), tokens, sample, body, sampling))
        return {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self._name,
            "choices": choices,
            "usage": _usage(prompts, choices),
        }

    def inference_generate(self, call: Call) -> Any:
        """Token ids in, token ids out."""
        body = call.body
        for name in ("token_ids", "sampling_params"):
            if name not in body:
                raise _bad(f"{name}: Field required", 422)
        self._refuse_other_names(body)
        tokens, given = body["token_ids"], body["sampling_params"]
        room = self.driver.longest - len(tokens)
        sampling = self._sampling(given, len(tokens), int(given.get("max_tokens") or room))
        name = "generate-tokens-" + str(body.get("request_id") or secrets.token_hex(8))
        choices = []
        for index, sample in enumerate(self._samples(tokens, given, sampling, name)):
            scores = None
            if given.get("logprobs") is not None:
                columns = zip(sample.tokens, sample.logps, strict=True)
                content = [
                    {"token": f"token_id:{t}", "logprob": _clamped(p), "top_logprobs": []}
                    for t, p in columns
                ]
                scores = {"content": content}
            choices.append(
                {
                    "index": index,
                    "token_ids": list(sample.tokens),
                    "finish_reason": _reason(sample),
                    "logprobs": scores,
                }
            )
        return {
            "request_id": name,
            "model": self._name,
            "created": int(time.time()),
            "choices": choices,
            "usage": _usage([tokens], choices),
            "prompt_logprobs": None,
        }

    def _refuse_other_names(self, body: dict[str, Any]) -> None:
        if body.get("model") not in (None, self._name, *self.adapters.paths):
            message = f"The model `{body['model']}` does not exist."
            raise Refusal(404, {"error": {"message": message, "type": "NotFoundError"}})
        if body.get("stream"):
            raise Refusal(501, {"error": {"message": "this server does not stream"}})

    def _sampling(self, given: dict[str, Any], prompt: int, most: int) -> Sampling:
        unknown = sorted(set(given) - set(_PARAMETERS) - _EXTRAS)
        if unknown:
            raise Refusal(501, {"error": {"message": f"this server has no {unknown[0]}"}})
        values = {**_PARAMETERS, **{k: v for k, v in given.items() if v is not None}}
        if prompt == 0:
            raise _bad("The decoder prompt cannot be empty")
        if prompt + most > self.driver.longest:
            raise _bad(f"This model's maximum context length is {self.driver.longest} tokens")
        if values["temperature"] < 0:
            raise _bad(f"temperature must be non-negative, got {values['temperature']}.")
        if not 0 < values["top_p"] <= 1:
            raise _bad(f"top_p must be in (0, 1], got {values['top_p']}.")
        if values["top_k"] < -1:
            raise _bad(f"top_k must be 0 (disable), or at least 1, got {values['top_k']}.")
        if values["min_tokens"] > most:
            raise _bad("min_tokens must be less than or equal to max_tokens")
        stop = values["stop"] or ()
        own = frozenset[int]() if values["ignore_eos"] else self.driver.eos_ids
        return Sampling(
            max_new_tokens=most,
            temperature=values["temperature"],
            top_k=values["top_k"] or -1,
            top_p=values["top_p"],
            min_p=values["min_p"],
            min_new_tokens=values["min_tokens"],
            stop_ids=frozenset(values["stop_token_ids"] or ()) | own,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        )

    def _samples(
        self, tokens: list[int], given: dict[str, Any], sampling: Sampling, rid: str
    ) -> list[Sample]:
        if self._asleep:
            raise Refusal(500, {"error": {"message": "the engine sleeps"}})
        seed, count = given.get("seed"), int(given.get("n") or 1)
        keys = [secrets.randbits(64) if seed is None else (seed + i) % 2**64 for i in range(count)]
        rule: Convention = "raw" if self._mode == "raw_logprobs" else "kept"
        name = given.get("model")
        driver = self.adapters.driver(None if name == self._name else name)
        assert driver is not None, "unknown names were refused"
        try:
            return driver.generate(tuple(tokens), keys, sampling, rid=rid, rule=rule)
        except UserError as refusal:
            raise _bad(str(refusal)) from refusal

    def _choice(
        self,
        index: int,
        prompt: list[int],
        sample: Sample,
        body: dict[str, Any],
        sampling: Sampling,
    ) -> dict[str, Any]:
        text = self.driver.decode(sample.tokens)
        matched = [s for s in sampling.stop_strings if s in text]
        is_token = bool(sample.tokens) and sample.tokens[-1] in sampling.stop_ids
        if sample.reason == "stop" and matched and not is_token:
            text = text[: text.rfind(matched[0])]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": _reason(sample),
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
        if sample.reason == "stop":
            own = sample.tokens[-1] in self.driver.eos_ids
            choice["stop_reason"] = (None if own else sample.tokens[-1]) if is_token else matched[0]
        if body.get("logprobs") is not None:
            is_named = bool(body.get("return_tokens_as_token_ids"))
            choice["logprobs"] = self._logprobs(sample, is_named)
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(sample.tokens), "prompt_token_ids": list(prompt)}
        return choice

    def _logprobs(self, sample: Sample, is_named: bool) -> dict[str, Any]:
        decode = self.driver.decode
        names = [f"token_id:{t}" if is_named else decode([t]) for t in sample.tokens]
        scores = [_clamped(logp) for logp in sample.logps]
        return {
            "text_offset": [0] * len(names),
            "token_logprobs": scores,
            "tokens": names,
            "top_logprobs": [{n: s} for n, s in zip(names, scores, strict=True)],
        }

    # Control.

    def pause(self, call: Call) -> Any:
        """Stop; what becomes of running requests is the mode's choice."""
        mode = call.option("mode", "abort")
        if mode not in _PAUSES:
            raise _bad(f"Invalid pause mode {mode!r}")
        self.adapters.each(lambda driver: driver.pause(_PAUSES[mode]))
        return {"status": "paused"}

    def resume(self, call: Call) -> Any:
        """Go on."""
        self.adapters.each(lambda driver: driver.resume())
        return {"status": "resumed"}

    def abort_requests(self, call: Call) -> Any:
        """End these requests, or all of them."""
        ids = call.body.get("request_ids")
        counts = self.adapters.each(
            lambda driver: driver.abort(lambda rid: ids is None or rid in ids)
        )
        return {"status": "aborted", "aborted": sum(counts)}

    def load_lora_adapter(self, call: Call) -> str:
        """An adapter becomes a model of its name; a name that is taken is refused."""
        name, folder = call.body.get("lora_name"), call.body.get("lora_path")
        if not name or not folder:
            raise _bad("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._name:
            raise _bad(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.adapters.paths and not call.body.get("load_inplace"):
            raise _bad(f"The lora adapter '{name}' has already been loaded.")
        try:
            if self.faults.take(call.path, "deaf") is not None:
                self.adapters.alias(name, folder)
            else:
                self.adapters.load(name, folder)
        except WeightsRefused as refusal:
            status = 404 if "No adapter found" in str(refusal) else 500
            raise Refusal(status, {"error": {"message": str(refusal)}}) from refusal
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload_lora_adapter(self, call: Call) -> str:
        """Forget an adapter."""
        name = call.body.get("lora_name") or ""
        if not self.adapters.unload(name):
            message = f"The lora adapter '{name}' cannot be found."
            raise Refusal(404, {"error": {"message": message, "type": "NotFoundError"}})
        return f"Success: LoRA adapter '{name}' removed successfully."

    def collective_rpc(self, call: Call) -> Any:
        """A method of the worker, or of its extension."""
        if "method" not in call.body:
            raise Refusal(400, {"error": {"message": "Missing 'method' in request body"}})
        method = getattr(self._worker, str(call.body["method"]), None)
        if method is None:
            raise Refusal(500, {"error": {"message": f"no method {call.body['method']}"}})
        try:
            if self.faults.take(call.path, "deaf") is not None:
                return {"results": [None]}
            found = method(*call.body.get("args", []), **call.body.get("kwargs", {}))
        except WeightsRefused as refusal:
            raise Refusal(500, {"error": {"message": str(refusal)}}) from refusal
        is_plain = found is None or isinstance(found, dict | list)
        return {"results": [found if is_plain else str(found)]}

    def _reload_folder(self, weights_path: str) -> None:
        self.driver.load(read_folder(weights_path))

    def update_weight_version(self, call: Call) -> Any:
        """Name the weights."""
        if "new_version" not in call.body:
            raise _bad("new_version: Field required")
        self.driver.set_version(str(call.body["new_version"]))
        return {"success": True, "new_version": self.driver.version}

    def sleep(self, call: Call) -> str:
        """Requests that run are ended."""
        self.adapters.each(lambda driver: driver.pause("abort"))
        self._asleep = {"weights", "kv_cache"} if call.option("level", "1") != "0" else set()
        return ""

    def wake_up(self, call: Call) -> str:
        """A part, or all of it."""
        self._asleep -= set(call.query.get("tags", ["weights", "kv_cache"]))
        if not self._asleep:
            self.adapters.each(lambda driver: driver.resume())
        return ""

    def models(self, call: Call) -> Any:
        """The model, then its adapters."""
        card = {
            "id": self._name,
            "object": "model",
            "owned_by": "vllm",
            "root": self.driver.folder,
            "max_model_len": self.driver.longest,
        }
        more = [
            {"id": name, "object": "model", "owned_by": "vllm", "root": path, "parent": self._name}
            for name, path in self.adapters.paths.items()
        ]
        return {"object": "list", "data": [card, *more]}


def _bad(message: str, status: int = 400) -> Refusal:
    return Refusal(status, {"error": {"message": message, "type": "BadRequestError"}})


def _reason(sample: Sample) -> str:
    return "abort" if sample.reason == "aborted" else sample.reason


def _clamped(logp: float) -> float:
    return _CLAMP if logp == -math.inf else max(logp, _CLAMP)


def _usage(prompts: list[list[int]], choices: list[dict[str, Any]]) -> dict[str, int]:
    before = sum(map(len, prompts))
    after = sum(len(choice["token_ids"] or ()) for choice in choices)
    return {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}


def spoil(fault: FaultName, body: Any) -> Any:
    """An answer with this fault."""
    if not isinstance(body, dict):
        return body
    body = json.loads(json.dumps(body))
    if fault == "other_model":
        if "data" in body:
            body["data"][0] |= {"id": "another/model", "root": "another/model"}
        return {**body, "model": "another/model"} if "model" in body else body
    if fault == "old_version" and "weight_version" in body:
        return {**body, "weight_version": "default"}
    choices = cast(list[dict[str, Any]], body.get("choices") or [])
    if fault == "fewer":
        return {**body, "choices": choices[:-1]}
    scores = choices[0].get("logprobs") if choices else None
    if scores and fault in ("tokens", "nan", "null"):
        _spoil_scores(fault, scores)
    return body


def _spoil_scores(fault: FaultName, scores: dict[str, Any]) -> None:
    wrong = float("nan") if fault == "nan" else None
    if "content" in scores:
        if fault == "tokens":
            scores["content"].pop()
        else:
            scores["content"][-1]["logprob"] = wrong
    elif fault == "tokens":
        scores["token_logprobs"].pop()
    else:
        scores["token_logprobs"][-1] = wrong


def main() -> None:
    """Serve a model's folder until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--worker-extension-cls")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    may_load = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    peer = VllmPeer(
        open_driver(given.model, longest=given.max_model_len),
        mode=given.logprobs_mode,
        is_dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        name=given.served_model_name,
        has_sleep_mode=given.enable_sleep_mode,
        extension=given.worker_extension_cls,
        max_lora_rank=given.max_lora_rank if given.enable_lora and may_load else 0,
    )
    peer.serve(given.port).wait()


if __name__ == "__main__":
    main()
