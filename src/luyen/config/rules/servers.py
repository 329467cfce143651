"""R: rollout engines that generate in a server."""

import shutil
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlsplit

from luyen.config.plan import count_weight_versions
from luyen.config.rules.rule import Finding, RuleContext, rule

_ROLLOUT = "actor_rollout_ref.rollout"
_OF_THE_RUN = ("host", "port", "uds")
"""Options by which a server of the run is reached."""


def _has_server(s: RuleContext) -> bool:
    facts = s.known.engines.get(s.config.actor_rollout_ref.rollout.name)
    return facts is not None and facts.is_server


@rule("R21", "error")
def server_samples_the_full_softmax(s: RuleContext) -> Iterator[Finding]:
    """A server does not say how much probability top-k, top-p and min-p leave."""
    rollout = s.config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    floor = val_kwargs.min_new_tokens
    filters = {
        "top_k": rollout.top_k > 0,
        "top_p": rollout.top_p < 1,
        "min_p": rollout.min_p > 0,
        "min_new_tokens": rollout.min_new_tokens > 0,
        "val_kwargs.top_k": val_kwargs.do_sample and val_kwargs.top_k > 0,
        "val_kwargs.top_p": val_kwargs.do_sample and val_kwargs.top_p < 1,
        "val_kwargs.min_p": val_kwargs.do_sample and val_kwargs.min_p > 0,
        "val_kwargs.min_new_tokens": floor is not None and floor > 0,
    }
    for name, is_set in filters.items():
        if is_set and _has_server(s):
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"`{rollout.name}` then reports other log-probabilities than those of the full "
                "softmax, and not how much probability was left",
                fix=f"drop the line, or set {_ROLLOUT}.name=native",
            )


@rule("R22", "error")
def gap_of_a_server_is_corrected(s: RuleContext) -> Iterator[Finding]:
    """Training on samples of a server has a rollout correction, or accepts the gap by name."""
    rollout, correction = s.config.actor_rollout_ref.rollout, s.config.algorithm.rollout_correction
    is_corrected = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    if _has_server(s) and not is_corrected and not rollout.server.accept_gap:
        yield Finding(
            field=f"{_ROLLOUT}.name",
            why=f"`{rollout.name}` computes with other kernels than the trainer: its samples are "
            "not exactly those of the policy that learns from them",
            fix="set algorithm.rollout_correction.rollout_is=token, or "
            f"{_ROLLOUT}.server.accept_gap=true; parity/engine_max shows the gap of every step",
        )


@rule("R23", "error")
def server_can_be_started(s: RuleContext) -> Iterator[Finding]:
    """A server that the run starts is installed where `server.python` says."""
    rollout = s.config.actor_rollout_ref.rollout
    if not _has_server(s) or rollout.server_urls:
        return
    python = rollout.server.python
    if python is not None and shutil.which(python) is None:
        yield Finding(
            field=f"{_ROLLOUT}.server.python",
            why="there is no such program on this machine",
            fix="give the python of the environment that the server is installed in",
        )
    facts = s.known.engines.get(rollout.name)
    module = None if facts is None else facts.server_module
    if python is None and module is not None and not s.installed(module):
        yield Finding(
            field=f"{_ROLLOUT}.name",
            why=f"the environment of the run has no {module}, the server of {rollout.name}",
            fix=f"pip install {rollout.name}, name another environment's python in "
            f"{_ROLLOUT}.server.python, or a running server in {_ROLLOUT}.server_urls",
        )


@rule("R24", "error")
def running_servers_suffice(s: RuleContext) -> Iterator[Finding]:
    """Servers that run already are as many as the run needs, and can take its weights."""
    rollout = s.config.actor_rollout_ref.rollout
    if not _has_server(s) or not rollout.server_urls:
        return
    needed = s.where.replicas * count_weight_versions(s.config.trainer)
    if len(rollout.server_urls) != needed:
        yield Finding(
            field=f"{_ROLLOUT}.server_urls",
            why=f"{len(rollout.server_urls)} are named and {needed} are needed: one for each copy "
            "of the engine and each version of the weights that is in use at once",
            fix=f"name {needed}",
        )
    needs_extension = {"ipc", "group"} if rollout.name == "vllm" else set[str]()
    if rollout.server.transport in needs_extension:
        yield Finding(
            field=f"{_ROLLOUT}.server.transport",
            why=f"`{rollout.server.transport}` needs our extension in the workers of vLLM, and the "
            "run does not start the servers of server_urls",
            fix="set it to folder, or drop server_urls",
        )


@rule("R26", "error")
def adapter_is_loaded_from_a_folder(s: RuleContext) -> Iterator[Finding]:
    """A server loads an adapter from a folder, and not one of the embedding or output layer."""
    config = s.config.actor_rollout_ref
    server, model = config.rollout.server, config.model
    if not _has_server(s) or server.lora_format != "adapter" or model.lora_rank == 0:
        return
    if server.transport != "folder":
        yield Finding(
            field=f"{_ROLLOUT}.server.transport",
            why="servers load an adapter by the path of its folder",
            fix=f"set it to folder, or {_ROLLOUT}.server.lora_format=merged",
        )
    ends = sorted({"lm_head", "embed_tokens"} & {n.split(".")[-1] for n in model.target_modules})
    if ends:
        yield Finding(
            field="actor_rollout_ref.model.target_modules",
            why=f"servers do not load an adapter of {ends[0]}",
            fix=f"drop it there, or set {_ROLLOUT}.server.lora_format=merged",
        )


@rule("R29", "error")
def servers_can_be_reached(s: RuleContext) -> Iterator[Finding]:
    """Servers have HTTP addresses without passwords; options leave theirs to the run."""
    rollout = s.config.actor_rollout_ref.rollout
    for url in rollout.server_urls if _has_server(s) else ():
        why = _why_no_address(url)
        if why is not None:
            fix = "write http://HOST:PORT"
            yield Finding(field=f"{_ROLLOUT}.server_urls", why=why, fix=fix)
    for engine, options in rollout.engine_kwargs.items():
        field = f"{_ROLLOUT}.engine_kwargs"
        if not isinstance(options, dict):
            yield Finding(
                field=field, why=f"`{engine}` has no named options", fix="write {OPTION: VALUE}"
            )
            continue
        for name in cast(dict[str, Any], options):
            if not name.replace("-", "_").replace(".", "_").isidentifier():
                why, fix = f"{name!r} is no name of an option", "write it as on the server's page"
                yield Finding(field=field, why=why, fix=fix)
            elif name in _OF_THE_RUN:
                why = f"the run chooses `{name}`, and would not find the server elsewhere"
                yield Finding(field=field, why=why, fix="drop the option")


@rule("R30", "error")
def server_of_the_run_has_one_gpu(s: RuleContext) -> Iterator[Finding]:
    """On Ray a copy of the engine has one GPU, so a server of the run is not split over several."""
    rollout = s.config.actor_rollout_ref.rollout
    is_started = _has_server(s) and not rollout.server_urls
    is_on_ray = s.where.runtime == "ray" and s.where.device == "cuda"
    if is_started and is_on_ray and rollout.tensor_model_parallel_size > 1:
        yield Finding(
            field=f"{_ROLLOUT}.tensor_model_parallel_size",
            why=f"Ray gives each copy of `{rollout.name}` a single GPU, and its server would need "
            f"{rollout.tensor_model_parallel_size}",
            fix="set it to 1, or start such servers yourself and name them in "
            f"{_ROLLOUT}.server_urls",
        )


def _why_no_address(url: str) -> str | None:
    """Why requests cannot be sent to a URL; None: they can."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"it is no address: {error}"
    if not is_http or not url.isascii() or any(c.isspace() for c in url):
        return "an address begins with http:// or https://, and has neither blanks nor accents"
    if parts.username is not None or parts.query or parts.fragment:
        return "a password, a query or a fragment of an address is not sent"
    return None


@rule("R25", "warning")
def keys_of_servers_have_an_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys of servers are changed only for an engine that has one, and that reads them."""
    rollout, names = s.config.actor_rollout_ref.rollout, ("python", "transport", "start_timeout_s")
    more = ("request_timeout_s", "retries", "accept_gap", "lora_format")
    unread: dict[str, str] = {}
    if not _has_server(s):
        why = f"`{rollout.name}` generates in this process"
        unread = {f"server.{name}": why for name in (*names, *more)} | {"server_urls": why}
    elif rollout.server_urls:
        unread = dict.fromkeys(("server.python", "server.start_timeout_s"), "the servers run")
    if rollout.name == "vllm" and s.where.device == "cpu" and rollout.free_cache_engine:
        unread["free_cache_engine"] = "vLLM has no sleep mode on CPUs"
    if s.config.actor_rollout_ref.model.lora_rank == 0:
        unread["server.lora_format"] = "lora_rank=0 trains all weights"
    for name, why in unread.items():
        if s.is_changed(f"{_ROLLOUT}.{name}"):
            yield Finding(field=f"{_ROLLOUT}.{name}", why=f"no effect: {why}", fix="drop the line")
    if rollout.server_urls and s.is_changed(f"{_ROLLOUT}.expert_parallel_size"):
        why, fix = "no effect: the servers run", "drop the line"
        yield Finding(field=f"{_ROLLOUT}.expert_parallel_size", why=why, fix=fix)
    if rollout.name != "openai" and s.is_changed(f"{_ROLLOUT}.server.logprobs"):
        why = f"no effect: `{rollout.name}` is asked for the log-probabilities it needs"
        yield Finding(field=f"{_ROLLOUT}.server.logprobs", why=why, fix="drop the line")
    for engine in rollout.engine_kwargs:
        if engine != rollout.name or not _has_server(s) or rollout.server_urls:
            why = f"no effect: the run starts no server of `{engine}`"
            yield Finding(field=f"{_ROLLOUT}.engine_kwargs", why=why, fix="drop the line")


@rule("R28", "error")
def transport_is_possible(s: RuleContext) -> Iterator[Finding]:
    """Transports between GPUs are chosen where server and trainer have them."""
    rollout = s.config.actor_rollout_ref.rollout
    transport = rollout.server.transport
    if not _has_server(s) or transport not in ("ipc", "transfer"):
        return
    reasons = {
        f"`{rollout.name}` has no such transport": rollout.name != "vllm",
        "the run trains on a CPU": s.where.device != "cuda",
        "each GPU of a server needs the weights, and only one is the trainer's": (
            transport == "ipc" and rollout.tensor_model_parallel_size > 1
        ),
        "the package vllm is not installed in the environment of the run, which sends by it": (
            transport == "transfer" and not s.installed("vllm")
        ),
    }
    for why, is_so in reasons.items():
        if is_so:
            fix = "set it to folder or group"
            yield Finding(field=f"{_ROLLOUT}.server.transport", why=why, fix=fix)
