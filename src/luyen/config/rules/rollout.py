"""R: the rollout engine, its limits, sampling parameters and device pools."""

from collections.abc import Iterator

from luyen.base.errors import did_you_mean
from luyen.config.model_folder.config_json import has_experts, read_raw
from luyen.config.model_folder.files import InvalidFile, folder_of
from luyen.config.model_folder.tokenizer import known_ids
from luyen.config.plan import (
    devices_of_a_copy,
    has_partial_rollouts,
    ranks_per_replica,
    uses_running_servers,
)
from luyen.config.rules.optim import cannot_divide
from luyen.config.rules.rule import Finding, RuleContext, rule

_ROLLOUT = "actor_rollout_ref.rollout"
_FEW_WAVES = 4
_NO_ADAPTER = (
    "register an engine for it in a plugin (trainer.plugins; docs/extend.md), or train with vllm "
    "or sglang; its OpenAI-compatible endpoint can be evaluated with the engine `openai`"
)
_NO_ENGINES = ("trtllm", "tensorrt_llm", "lmdeploy", "tgi", "mlc", "llama_cpp", "llama.cpp")
_FOREIGN: dict[str, str] = dict.fromkeys(_NO_ENGINES, _NO_ADAPTER)
"""Engines of the field without an adapter, and the way out."""


@rule("R01", "error")
def engine_exists(s: RuleContext) -> Iterator[Finding]:
    """`rollout.name` is a registered engine."""
    rollout = s.config.actor_rollout_ref.rollout
    if rollout.name not in s.known.engines:
        near = f"{did_you_mean(rollout.name, s.known.engines)}; a plugin may register another one"
        fix = _FOREIGN.get(rollout.name, near)
        yield Finding(field=f"{_ROLLOUT}.name", why="no such rollout engine is registered", fix=fix)


@rule("R02", "error")
def engine_is_installed(s: RuleContext) -> Iterator[Finding]:
    """The package that the engine needs is installed."""
    rollout = s.config.actor_rollout_ref.rollout
    facts = s.known.engines.get(rollout.name)
    if facts is not None and facts.package is not None and not s.installed(facts.package):
        brought = f"'luyen[{facts.extra}]'" if facts.extra is not None else facts.package
        yield Finding(
            field=f"{_ROLLOUT}.name",
            why=f"the engine needs the package {facts.package}, which is not installed here",
            fix=f"pip install {brought}, or set {_ROLLOUT}.name=native, which needs nothing",
        )


@rule("R27", "error")
def engine_takes_weights(s: RuleContext) -> Iterator[Finding]:
    """The engine of a run that learns takes the weights that are published after every step."""
    rollout = s.config.actor_rollout_ref.rollout
    facts = s.known.engines.get(rollout.name)
    if facts is not None and not facts.takes_weights:
        yield Finding(
            field=f"{_ROLLOUT}.name",
            why=f"`{rollout.name}` samples from a fixed model: it cannot take the weights of a "
            "policy that learns",
            fix=f"train with {_ROLLOUT}.name=native, vllm or sglang; `luyen eval` measures an "
            "endpoint with this engine",
        )


@rule("R03", "error")
def sequence_fits_the_engine(s: RuleContext) -> Iterator[Finding]:
    """`max_model_len` holds the longest prompt and the longest response."""
    rollout, data = s.config.actor_rollout_ref.rollout, s.config.data
    if rollout.max_model_len is not None and rollout.max_model_len < s.batch.longest_sequence:
        yield Finding(
            field=f"{_ROLLOUT}.max_model_len",
            why=f"max_prompt_length {data.max_prompt_length} + max_response_length "
            f"{data.max_response_length} = {s.batch.longest_sequence} tokens",
            fix=f"set it to at least {s.batch.longest_sequence}, or drop it",
        )


@rule("R04", "error")
def group_fits_the_token_budget(s: RuleContext) -> Iterator[Finding]:
    """The samples of one prompt fit the engine's limits; `hf` and servers split them."""
    rollout = s.config.actor_rollout_ref.rollout
    facts = s.known.engines.get(rollout.name)
    splits_group = rollout.name == "hf" or (facts is not None and facts.is_server)
    for name, limit in (
        ("max_num_seqs", rollout.max_num_seqs),
        ("max_num_batched_tokens", rollout.max_num_batched_tokens),
    ):
        if rollout.n > limit and not splits_group:
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"rollout.n={rollout.n} samples of a prompt decode one token each in a pass, "
                f"and {name} allows {limit}: the group cannot run together",
                fix=f"raise {name} with rollout.n, to at least {rollout.n}",
            )


@rule("R05", "warning")
def token_budget_feeds_every_sequence(s: RuleContext) -> Iterator[Finding]:
    """A pass has room for one token of every sequence that may run."""
    rollout = s.config.actor_rollout_ref.rollout
    is_short = rollout.n <= rollout.max_num_batched_tokens < rollout.max_num_seqs
    if is_short and rollout.name != "hf":
        yield Finding(
            field=f"{_ROLLOUT}.max_num_batched_tokens",
            why=f"{rollout.max_num_seqs} sequences may run (max_num_seqs) but a pass holds "
            f"{rollout.max_num_batched_tokens} tokens: the rest would wait",
            fix=f"set it to at least {rollout.max_num_seqs}, or lower max_num_seqs",
        )


@rule("R20", "note")
def step_is_generated_in_few_waves(s: RuleContext) -> Iterator[Finding]:
    """The rollouts of a step run in a few waves; a larger batch first slows generation down."""
    rollout, copies = s.config.actor_rollout_ref.rollout, s.where.replicas
    is_hf = rollout.name == "hf"  # It runs the samples of one prompt together, and no others.
    each = min(rollout.max_num_seqs, rollout.n) if is_hf else rollout.max_num_seqs
    room = each * copies
    if s.batch.rollouts <= _FEW_WAVES * room:
        return
    is_group = s.batch.prompts <= _FEW_WAVES * room
    grown = "rollout.n" if is_group else "data.train_batch_size"
    engines = f"{copies} engines hold" if copies > 1 else "the engine holds"
    limit = "the samples of one prompt, name=hf" if is_hf else "max_num_seqs"
    more = "choose rollout.name=native" if is_hf else "raise max_num_seqs as the KV cache allows"
    yield Finding(
        field=f"{_ROLLOUT}.n" if is_group else "data.train_batch_size",
        why=f"a step has {s.batch.rollouts} rollouts and {engines} {each} "
        f"sequences{' each' if copies > 1 else ''} at once ({limit}): they "
        f"are generated in about {-(-s.batch.rollouts // room)} waves, so raising {grown} makes "
        "generation the bottleneck before the update",
        fix=f"{more}, add engines, or lower it",
    )


@rule("R06", "error")
def samples_differ(s: RuleContext) -> Iterator[Finding]:
    """Several samples of a prompt are sampled, not the likeliest answer many times."""
    rollout = s.config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    if rollout.temperature == 0 and rollout.n > 1:
        yield Finding(
            field=f"{_ROLLOUT}.temperature",
            why=f"at temperature 0 all {rollout.n} samples of a prompt are the same",
            fix="set a temperature > 0, usually 1",
        )
    if val_kwargs.n > 1 and not val_kwargs.do_sample:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.n",
            why=f"without do_sample all {val_kwargs.n} validation samples are the same",
            fix="set val_kwargs.do_sample=true and a val_kwargs.temperature > 0, or n=1",
        )


@rule("R07", "error")
def validation_temperature_fits(s: RuleContext) -> Iterator[Finding]:
    """Sampling at validation has a temperature; greedy decoding has no sampling parameters."""
    val_kwargs = s.config.actor_rollout_ref.rollout.val_kwargs
    if val_kwargs.do_sample and val_kwargs.temperature == 0:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.temperature",
            why="do_sample is on and the temperature is 0",
            fix="set a temperature > 0, or do_sample=false",
        )
    greedy = {
        "temperature": val_kwargs.temperature,
        "top_k": val_kwargs.top_k,
        "top_p": val_kwargs.top_p,
        "min_p": val_kwargs.min_p,
    }
    for name in greedy:
        if not val_kwargs.do_sample and s.is_changed(f"{_ROLLOUT}.val_kwargs.{name}"):
            yield Finding(
                field=f"{_ROLLOUT}.val_kwargs.{name}",
                why="do_sample is off, so it has no effect",
                fix="drop it, or set val_kwargs.do_sample=true",
            )


@rule("R08", "warning")
def engine_splits_the_model(s: RuleContext) -> Iterator[Finding]:
    """Only an engine with tensor parallelism splits a model over several devices."""
    rollout, engines = s.config.actor_rollout_ref.rollout, s.known.engines
    facts = engines.get(rollout.name)
    if facts is None or facts.splits:
        return
    reason = "holds the whole model on each device, and each has a copy"
    splitting = " or ".join(name for name, other in engines.items() if other.splits)
    fix = f"drop the line, or choose {splitting}, of which a copy can be split"
    sizes = {"tensor_model_parallel_size": rollout.tensor_model_parallel_size}
    if facts.is_server:
        reason, fix = "is a server that runs already, on devices of its own", "drop the line"
    else:
        sizes["expert_parallel_size"] = rollout.expert_parallel_size or 1
    for name, size in sizes.items():
        if size > 1:
            why = f"no effect: `{rollout.name}` {reason}"
            yield Finding(field=f"{_ROLLOUT}.{name}", why=why, fix=fix)


@rule("R10", "error")
def prompt_fits_one_pass(s: RuleContext) -> Iterator[Finding]:
    """The embedded engine reads a prompt in one pass, and a turn begins with all that was said."""
    rollout, data = s.config.actor_rollout_ref.rollout, s.config.data
    longest, whose = data.max_prompt_length, "data.max_prompt_length"
    # On a GPU a conversation that grew beyond a pass is read alone.
    reads_answers = rollout.multi_turn.enable or has_partial_rollouts(s.config.trainer)
    if reads_answers and s.where.device == "cpu":
        longest += data.max_response_length - 1
        why = "a turn" if rollout.multi_turn.enable else "a new version of the weights"
        whose += f" and data.max_response_length, since {why} begins with all that was said"
    if rollout.name == "native" and rollout.max_num_batched_tokens < longest:
        yield Finding(
            field=f"{_ROLLOUT}.max_num_batched_tokens",
            why=f"a pass holds {rollout.max_num_batched_tokens} tokens and a prompt may have "
            f"{longest} ({whose})",
            fix=f"set it to at least {longest}",
        )


# R: sampling parameters and stop conditions, in training and at validation.


@rule("R14", "error")
def stop_strings_are_texts(s: RuleContext) -> Iterator[Finding]:
    """A stop string has at least one character."""
    rollout = s.config.actor_rollout_ref.rollout
    for field, stop in (("stop", rollout.stop), ("val_kwargs.stop", rollout.val_kwargs.stop)):
        if stop is not None and not all(stop):
            why = "an empty text is in every answer, and would end each of them at once"
            yield Finding(field=f"{_ROLLOUT}.{field}", why=why, fix="drop it; [] has none")


@rule("R15", "error")
def answers_have_room(s: RuleContext) -> Iterator[Finding]:
    """`min_new_tokens` fits the response length, and so does validation's `max_new_tokens`."""
    rollout, most = s.config.actor_rollout_ref.rollout, s.config.data.max_response_length
    val_kwargs = rollout.val_kwargs
    longest = val_kwargs.max_new_tokens or most
    if longest > most:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.max_new_tokens",
            why=f"engine and memory are laid out for data.max_response_length={most}",
            fix=f"set it to at most {most}, or raise data.max_response_length",
        )
    own = val_kwargs.min_new_tokens
    floors = [("min_new_tokens", rollout.min_new_tokens, most)]
    if own is not None or longest < most:
        name = "min_new_tokens" if own is None else "val_kwargs.min_new_tokens"
        floors.append((name, rollout.min_new_tokens if own is None else own, min(most, longest)))
    for name, floor, limit in floors:
        if floor > limit:
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"an answer would need {floor} tokens and has room for {limit}",
                fix=f"set it below {limit}",
            )


@rule("R16", "error")
def stop_tokens_exist(s: RuleContext) -> Iterator[Finding]:
    """`stop_token_ids` are ids of the model's tokenizer, where its files are on this machine."""
    rollout, model = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.model
    folder = folder_of(model.tokenizer_path or model.path)
    try:
        known = None if folder is None else known_ids(folder)
    except InvalidFile:
        return  # another rule says why
    for field, ids in (
        ("stop_token_ids", rollout.stop_token_ids),
        ("val_kwargs.stop_token_ids", rollout.val_kwargs.stop_token_ids),
    ):
        unknown = [i for i in ids or () if known is not None and i >= known]
        if unknown and known is not None:
            yield Finding(
                field=f"{_ROLLOUT}.{field}",
                why=f"the tokenizer knows the ids 0 to {known - 1}, and {unknown[0]} is none",
                fix="name ids of this model's tokenizer",
            )


@rule("R17", "warning")
def greedy_sampling_has_no_filter(s: RuleContext) -> Iterator[Finding]:
    """At temperature 0 the likeliest token is taken, whatever unlikely ones are ruled out."""
    rollout = s.config.actor_rollout_ref.rollout
    for name in ("top_k", "top_p", "min_p"):
        if rollout.temperature == 0 and s.is_changed(f"{_ROLLOUT}.{name}"):
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why="the likeliest token is taken at temperature 0, so it has no effect",
                fix="drop it, or set a temperature > 0",
            )


@rule("R18", "note")
def memory_share_is_read(s: RuleContext) -> Iterator[Finding]:
    """`gpu_memory_utilization` bounds the pages of keys and values of `native` on a GPU."""
    rollout = s.config.actor_rollout_ref.rollout
    is_paged = rollout.name == "native" and s.where.device != "cpu"
    if rollout.name in ("native", "hf") and not is_paged:
        if f"{_ROLLOUT}.gpu_memory_utilization" not in s.written:
            return
        reason = "the run is on a CPU" if s.where.device == "cpu" else "`hf` has no pages"
        yield Finding(
            field=f"{_ROLLOUT}.gpu_memory_utilization",
            why=f"{reason}: it has no effect here",
            fix="lower max_num_seqs where memory is short",
        )


@rule("R19", "warning")
def plain_generation_reads_the_key(s: RuleContext) -> Iterator[Finding]:
    """Keys that only the embedded engine reads are changed only for it."""
    reasons = {
        "enforce_eager": "it captures no graphs",
        "free_cache_engine": "it keeps nothing between two requests",
        "deterministic": "its gap to the trainer is measured, never closed",
    }
    is_hf = s.config.actor_rollout_ref.rollout.name == "hf"
    on_gpu = reasons if s.where.device != "cpu" else {}
    kept = {"enable_prefix_caching": reasons["free_cache_engine"]}
    for name, reason in {**on_gpu, **kept}.items():
        if is_hf and s.is_changed(f"{_ROLLOUT}.{name}"):
            why = f"`hf` generates, where it has no effect: {reason}"
            fix = f"drop the line, or set {_ROLLOUT}.name=native"
            yield Finding(field=f"{_ROLLOUT}.{name}", why=why, fix=fix)


# R: devices of generation, and copies of the rollout engine on them.


def _sides(s: RuleContext) -> tuple[int, str, int]:
    """Devices that the copies take, how that was worked out, and devices that there are."""
    copies, each = s.where.replicas, devices_of_a_copy(s.config)
    words = f"data_parallel_size {copies} x tensor_model_parallel_size {each} = {copies * each}"
    pool = s.where.rollout_pool
    there = pool[0] * pool[1] if pool is not None else s.where.world_size
    return copies * each, words, there


@rule("R09", "error")
def replicas_fit_the_devices(s: RuleContext) -> Iterator[Finding]:
    """The copies of the engine, each on its devices, fit the devices that generate."""
    needed, words, there = _sides(s)
    # Servers that run already have devices of their own.
    if needed > there and not uses_running_servers(s.config):
        whose = "trainer" if s.where.rollout_pool is None else "rollout"
        yield Finding(
            field=f"{_ROLLOUT}.data_parallel_size",
            why=f"{words} devices, and {whose}.nnodes x n_gpus_per_node = {there}",
            fix="take fewer copies, or more devices",
        )


@rule("R31", "error")
def devices_share_a_copy(s: RuleContext) -> Iterator[Finding]:
    """A copy of `native` is divided over devices of one node, in processes of their own."""
    size, nodes = ranks_per_replica(s.config), s.where.rollout_pool
    if size == 1 or s.config.trainer.stage != "rl":
        return
    field, model = f"{_ROLLOUT}.tensor_model_parallel_size", s.config.actor_rollout_ref.model
    node = s.config.trainer.n_gpus_per_node if nodes is None else nodes[1]
    if s.where.runtime == "local":
        fix = "set it to 1, or set trainer.runtime to ray or auto and n_gpus_per_node above 1"
        yield Finding(field=field, why="a run in one process has one device", fix=fix)
    elif node % size:
        why = f"a node has {node} devices that generate, and {size} of a node share a copy"
        yield Finding(field=field, why=why, fix=f"set it to a divisor of {node}")
    elif model.quantization != "none":
        yield Finding(field=field, why="4-bit weights cannot be divided", fix="set it to 1")
    else:
        yield from cannot_divide(field, read_raw(model) or {}, size, key=field)


_WITH_EXPERTS = ("native", "vllm", "sglang")
"""Engines whose devices share the experts of a layer."""


@rule("R32", "error")
def devices_of_a_copy_share_experts(s: RuleContext) -> Iterator[Finding]:
    """All devices of a copy share the experts of a layer; with SGLang also groups of them."""
    rollout, devices = s.config.actor_rollout_ref.rollout, devices_of_a_copy(s.config)
    size = rollout.expert_parallel_size
    if size is None or size in (1, devices) or not _may_have_experts(s):
        return
    if rollout.name == "sglang" and devices % size == 0:
        return
    if rollout.name in _WITH_EXPERTS and not uses_running_servers(s.config):
        field = f"{_ROLLOUT}.tensor_model_parallel_size"
        word = "1 device" if devices == 1 else f"{devices} devices"
        why = f"a copy has {word} ({field}) to share the experts of its layers"
        fix = f"set it to {devices} or drop the line, or set {field} to {size}"
        yield Finding(field=f"{_ROLLOUT}.expert_parallel_size", why=why, fix=fix)


@rule("R33", "warning")
def experts_are_shared_as_written(s: RuleContext) -> Iterator[Finding]:
    """Devices share experts where there are some; `native` never divides an expert."""
    rollout, devices = s.config.actor_rollout_ref.rollout, devices_of_a_copy(s.config)
    size, field = rollout.expert_parallel_size, f"{_ROLLOUT}.expert_parallel_size"
    if size is None or rollout.name not in _WITH_EXPERTS or uses_running_servers(s.config):
        return
    if size > 1 and not _may_have_experts(s):
        why = "no effect: the layers of the model have no experts"
        yield Finding(field=field, why=why, fix="drop the line")
    elif size == 1 < devices and rollout.name == "native" and _may_have_experts(s):
        why = f"no effect: each of the {devices} devices of a copy has some experts, each whole"
        yield Finding(field=field, why=why, fix=f"set it to {devices}, or drop the line")


@rule("R34", "warning")
def weights_are_read_in_place(s: RuleContext) -> Iterator[Finding]:
    """CUDA IPC is for replicas that generate in turn with one rank, on its GPU."""
    rollout = s.config.actor_rollout_ref.rollout
    reasons = {
        "a run in one process has one copy of the weights": s.where.runtime != "ray",
        "there is no GPU": s.where.device != "cuda",
        f"`{rollout.name}` gets its weights in another way": rollout.name != "native",
        "the weights of several ranks are sharded": s.where.world_size > 1,
        "versions are needed again that the rank does not have any more": (
            s.config.trainer.max_staleness > 0
        ),
    }
    why = next((why for why, is_so in reasons.items() if is_so), None)
    if rollout.cuda_ipc and why is not None:
        yield Finding(field=f"{_ROLLOUT}.cuda_ipc", why=f"no effect: {why}", fix="set it to false")


def _may_have_experts(s: RuleContext) -> bool:
    """Whether the model is a mixture, or not known."""
    raw = read_raw(s.config.actor_rollout_ref.model)
    return raw is None or has_experts(raw)


@rule("R11", "error")
def every_pool_device_generates(s: RuleContext) -> Iterator[Finding]:
    """Every device of a pool that only generates has a copy of the engine."""
    needed, words, there = _sides(s)
    if s.where.rollout_pool is not None and needed < there:
        yield Finding(
            field=f"{_ROLLOUT}.data_parallel_size",
            why=f"{words} devices generate, and {there} are reserved for it: the rest would idle",
            fix="drop the line: every device then generates, or make the pool smaller",
        )


@rule("R12", "error")
def pools_need_processes(s: RuleContext) -> Iterator[Finding]:
    """A separate rollout pool needs the Ray runtime."""
    if s.where.rollout_pool is not None and s.where.runtime == "local":
        nodes, each = s.where.rollout_pool
        yield Finding(
            field=f"{_ROLLOUT}.nnodes",
            why=f"{nodes} x {each} devices are set aside for generation, and "
            "trainer.runtime=local is one process on one device",
            fix="set trainer.runtime to ray or auto, or drop the line",
        )


@rule("R13", "warning")
def keys_of_the_pool_have_an_effect(s: RuleContext) -> Iterator[Finding]:
    """Keys about shared devices are changed only if they are read."""
    is_split = s.where.rollout_pool is not None
    if not is_split and s.is_changed(f"{_ROLLOUT}.n_gpus_per_node"):
        yield Finding(
            field=f"{_ROLLOUT}.n_gpus_per_node",
            why="rollout.nnodes is 0: the engine shares the devices of the actor, which are "
            "trainer.n_gpus_per_node",
            fix="drop the line, or set rollout.nnodes",
        )
    why = None
    if is_split:
        why = "nothing trains on the devices that generate, so no training needs the memory"
    elif s.config.trainer.max_staleness > 0:
        why = "trainer.max_staleness > 0: the engine generates while the policy learns"
    if why is not None and s.config.actor_rollout_ref.rollout.free_cache_engine:
        yield Finding(field=f"{_ROLLOUT}.free_cache_engine", why=why, fix="drop the line")
