"""Keys, rules and pages that words lead to."""

from collections.abc import Iterator

from luyen.config.choices import choices_of
from luyen.config.fields import FieldInfo, all_fields
from luyen.config.rules.all import RULES

_MOST = 12
"""Keys, and rules, that are listed."""
PAGES: dict[str, str] = {
    "docs/data.md": "rows dataset prompt template system formats gsm8k jsonl parquet sampler",
    "docs/rewards.md": "reward function score rule trl components",
    "docs/judges.md": "judge llm endpoint grader",
    "docs/reward_models.md": "reward model rm value",
    "docs/algorithms": "grpo ppo rloo gae dapo gspo dpo kto loss estimator advantage kl",
    "docs/stages.md": "sft dpo kto preference reward model offline stage finetuning",
    "docs/reliability.md": "resume checkpoint crash interrupt save kill",
    "docs/run_directory.md": "run directory files metrics logger wandb tensorboard",
    "docs/distributed.md": "ray gpu gpus multi node fsdp cluster devices",
    "docs/async.md": "async staleness",
    "docs/tools.md": "tool tools function calling mcp",
    "docs/multi_turn.md": "turns conversation agent multi",
    "docs/environments.md": "environment world env",
    "docs/distillation.md": "distill distillation teacher",
    "docs/evaluation.md": "eval evaluation validation pass@k",
    "docs/commands.md": "command commands sweep cli",
    "docs/doctor.md": "doctor diagnosis",
    "docs/pipelines.md": "pipeline stages",
    "docs/config.md": "configuration keys verl llama-factory lora",
}
"""Page -> words that lead to it."""


def search(text: str) -> str | None:
    """What has to do with the words, the closest first; None where nothing has.

    Example:
        >>> print(search("resume").splitlines()[1].split()[0])
        trainer.resume_mode
    """
    words = text.lower().replace("_", " ").split()
    keys = sorted(
        ((_rank(words, info), info) for info in all_fields().values()), key=lambda p: p[0]
    )
    found = [info for rank, info in keys if rank < _NEVER]
    rules = [rule for rule in RULES.values() if all(word in rule.doc.lower() for word in words)]
    pages = [page for page, known in PAGES.items() if all(word in known.split() for word in words)]
    if not (found or rules or pages):
        return None
    return "\n".join(_lines(text, found, [f"{r.id}  {r.doc}" for r in rules], pages))


_NEVER = 5


def _rank(words: list[str], info: FieldInfo) -> int:
    """How close a key is to the words: 0 for its name, up to what is said about it."""
    name = info.path.rpartition(".")[2].replace("_", " ")
    texts = (
        name.split(),
        [choice.lower() for choice in choices_of(info)],
        name,
        info.path.lower().replace("_", " "),
        f"{info.doc} {info.derived or ''}".lower(),
    )
    for rank, known in enumerate(texts):
        if all(word in known for word in words):
            return rank
    return _NEVER


def _lines(text: str, keys: list[FieldInfo], rules: list[str], pages: list[str]) -> Iterator[str]:
    yield f"About `{text}`:"
    for info in keys[:_MOST]:
        yield f"  {info.path}  {info.doc}"
    if len(keys) > _MOST:
        yield f"  and {len(keys) - _MOST} more keys"
    for rule in rules[:_MOST]:
        yield f"  rule {rule}"
    if pages:
        yield f"  read {', '.join(pages)}"
    yield "`luyen explain KEY` says more about one of them."
