"""R: how tokens are drawn and when an answer ends, in training and at validation."""

from collections.abc import Iterator

from luyen.config.model_folder.files import UnsoundFile
from luyen.config.model_folder.locate import folder_of
from luyen.config.model_folder.tokenizer import known_ids
from luyen.config.rules.rule import Finding, Situation, rule

_ROLLOUT = "actor_rollout_ref.rollout"


@rule("R14", "error")
def stop_strings_are_texts(s: Situation) -> Iterator[Finding]:
    """A stop string has at least one character."""
    rollout = s.config.actor_rollout_ref.rollout
    for field, stop in (("stop", rollout.stop), ("val_kwargs.stop", rollout.val_kwargs.stop)):
        if stop is not None and not all(stop):
            why = "an empty text is in every answer, and would end each of them at once"
            yield Finding(field=f"{_ROLLOUT}.{field}", why=why, fix="drop it; [] has none")


@rule("R15", "error")
def answers_have_room(s: Situation) -> Iterator[Finding]:
    """An answer may be as long as it must be, and validation draws no more than fits."""
    rollout, most = s.config.actor_rollout_ref.rollout, s.config.data.max_response_length
    val_kwargs = rollout.val_kwargs
    drawn = val_kwargs.max_new_tokens or most
    if drawn > most:
        yield Finding(
            field=f"{_ROLLOUT}.val_kwargs.max_new_tokens",
            why=f"engine and memory are laid out for data.max_response_length={most}",
            fix=f"set it to at most {most}, or raise data.max_response_length",
        )
    own = val_kwargs.min_new_tokens
    floors = [("min_new_tokens", rollout.min_new_tokens, most)]
    if own is not None or drawn < most:
        name = "min_new_tokens" if own is None else "val_kwargs.min_new_tokens"
        floors.append((name, rollout.min_new_tokens if own is None else own, min(most, drawn)))
    for name, floor, limit in floors:
        if floor > limit:
            yield Finding(
                field=f"{_ROLLOUT}.{name}",
                why=f"an answer would need {floor} tokens and has room for {limit}",
                fix=f"set it below {limit}",
            )


@rule("R16", "error")
def stop_tokens_exist(s: Situation) -> Iterator[Finding]:
    """`stop_token_ids` are ids of the model's tokenizer, where its files are on this machine."""
    rollout, model = s.config.actor_rollout_ref.rollout, s.config.actor_rollout_ref.model
    folder = folder_of(model.tokenizer_path or model.path)
    try:
        known = None if folder is None else known_ids(folder)
    except UnsoundFile:
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
def greedy_draws_have_no_filter(s: Situation) -> Iterator[Finding]:
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
def memory_share_is_read(s: Situation) -> Iterator[Finding]:
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
def plain_generation_reads_the_key(s: Situation) -> Iterator[Finding]:
    """Keys that only the embedded engine reads are changed only for it."""
    reasons = {
        "enforce_eager": "it captures no graphs",
        "free_cache_engine": "it keeps nothing between two requests",
        "deterministic": "its gap to the trainer is measured, never closed",
    }
    is_hf = s.config.actor_rollout_ref.rollout.name == "hf" and s.where.device != "cpu"
    for name, reason in reasons.items():
        if is_hf and s.is_changed(f"{_ROLLOUT}.{name}"):
            why = f"`hf` generates, where it has no effect: {reason}"
            fix = f"drop the line, or set {_ROLLOUT}.name=native"
            yield Finding(field=f"{_ROLLOUT}.{name}", why=why, fix=fix)
