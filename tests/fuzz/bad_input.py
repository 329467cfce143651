"""Configurations, rows and lists of tools that are wrong, each a pure function of its number."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import yaml

from luyen.config.fields import all_fields

ROLLOUT = "actor_rollout_ref.rollout"
WORDS: tuple[str, ...] = (
    "data.train_files=arithmetic://sum?digits=1&size=8",
    "data.val_files=arithmetic://sum?digits=1&size=3&split=held-out",
    "data.max_prompt_length=64",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"{ROLLOUT}.n=4",
    "algorithm.adv_estimator=grpo",
    "reward.components={right: {rule: exact, weight: 1.0}, brief: {rule: length}}",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
)
"""A sound configuration, as overrides."""
PAGE = """\
data: {train_files: 'arithmetic://sum?digits=1&size=8', train_batch_size: 4, max_prompt_length: 64}
actor_rollout_ref:
  actor: &actor
    ppo_mini_batch_size: 4
    optim: {lr: 1.0e-4, weight_decay: 0.01}
  rollout:
    n: 4   # siblings
    temperature: 1.0
reward:
  components:
    right: {rule: exact, weight: 1.0}
    form: {rule: regex, weight: 0.5, kwargs: {pattern: '[0-9]+', match: search}}
trainer:
  total_training_steps: 2
  project_name: "${oc.env:USER,nobody}"
  experiment_name: 'run ${trainer.total_training_steps}'
  logger: [console, jsonl]
"""
PIPELINE = """\
name: both
defaults:
  data: {train_batch_size: 4, max_prompt_length: 64}
stages:
  - name: sft
    config:
      trainer: {stage: sft, total_training_steps: 1}
      data: {train_files: 'arithmetic://sum?digits=1&size=8&traces=1'}
  - name: rl
    config:
      data: {train_files: 'arithmetic://sum?digits=1&size=8'}
      actor_rollout_ref: {model: {path: 'artifact:sft'}, actor: {ppo_mini_batch_size: 4}}
"""
TOOLS = """\
tools:
  - builtin: calculator
    limits: {timeout_s: 5, retries: 1}
  - builtin: search
    config: {documents: {a: b, c: d}, top_k: 2}
"""
USERS = (
    "interaction:\n  - {name: teacher, class_name: some.module.Teacher, config: {hint: Higher}}\n"
)
SERVERS = '{"mcpServers": {"files": {"command": "serve", "args": ["-v"], "env": {"A": "b"}}}}'
ROW: dict[str, Any] = {
    "prompt": [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "2"},
    ],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 1, "more": [1, None, 0.5]},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
ADDRESS = "arithmetic://sum?digits=1&size=8&seed=3&split=train"

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    -(2**40),
    2**40,
    2**63,
    10**400,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "word",
    "../..",
    "a" * 5000,
    "\u0000\u001b[2J",
    "\u202e\U0001f600\u0301",
    "${data.seed}",
    "${nothing}",
    "artifact:none@abcdef",
    "arithmetic://sum?size=-1",
    "(",
    "~nobody-at-all/x",
    "/dev/zero",
    [],
    [None],
    [[]],
    ["x", 1, {}],
    {},
    {"": 1},
    {"a": {"b": {"c": [1]}}},
    {1: 2},
)
"""What takes the place of a value; the rest of the file stays as it is."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput:
    """One wrong input.

    Example:
        >>> len(all_inputs()) >= 400
        True
    """

    number: int
    """Seed of every choice."""
    kind: str
    """What is wrong: `key`, `file`, `row`, `rows`, `tools`, `users`, `servers`, `stages`, ..."""
    text: str | bytes
    """The file, or for `key` and `address` what is written there."""
    key: str = ""
    """The key that `text` stands at."""

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {self.key}".strip()


def _flip(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(8 * len(data))
    return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    return b"".join([*lines[:place], *lines[place : place + 1] * 2, *lines[place + 1 :]])


def _noise(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + chance.randbytes(chance.randrange(1, 8)) + data[place:]


def _mark(data: bytes, chance: random.Random) -> bytes:
    """A character that means something put in somewhere."""
    place = chance.randrange(len(data))
    return data[:place] + chance.choice(b"{}[]:,&*!|>'\"%@`#-\t\n\\$?").to_bytes() + data[place:]


def _swap(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    chance.shuffle(lines)
    return b"".join(lines)


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _cut,
    _repeat,
    _noise,
    _mark,
    _mark,
    _swap,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested data."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            found += _places(inner, (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(cast(list[Any], value)):
            found += _places(inner, (*path, i))
    return found


def _changed(value: Any, chance: random.Random) -> Any:
    """A copy in which one place holds something else."""
    copy = json.loads(json.dumps(value))
    *above, last = chance.choice(_places(copy))
    inner = copy
    for name in above:
        inner = inner[name]
    inner[last] = chance.choice(VALUES)
    return copy


def _written(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # a name that is a number beside others
        return json.dumps(str(value))


def _keys(count: int) -> list[tuple[str, str, str]]:
    """Every key of the configuration, then some again, each with a value of another kind."""
    names = list(all_fields())
    chance = random.Random(7)
    chance.shuffle(names)
    values = [VALUES[i % len(VALUES)] for i in range(count)]
    chance.shuffle(values)
    return [("key", _flow(value), names[i % len(names)]) for i, value in enumerate(values[:count])]


def _flow(value: Any) -> str:
    return _written(value).removesuffix("\n...").strip()


def _damaged(kind: str, page: str, count: int) -> list[tuple[str, str | bytes, str]]:
    found: list[tuple[str, str | bytes, str]] = []
    for i in range(count):
        chance = random.Random(f"{kind} {i}")
        data = page.encode()
        for _ in range(chance.choice((1, 1, 1, 3))):
            data = _DAMAGES[i % len(_DAMAGES)](data, chance) or b" "
        found.append((kind, data, ""))
    return found


def _retyped(kind: str, page: Any, count: int, write: Callable[[Any], str]) -> list[Any]:
    chances = [random.Random(f"{kind} retyped {i}") for i in range(count)]
    return [(kind, write(_changed(page, chance)), "") for chance in chances]


def all_inputs() -> Sequence[BadInput]:
    """The whole table, always the same."""
    found: list[tuple[str, str | bytes, str]] = _keys(max(220, len(all_fields())))
    found += _damaged("file", PAGE, 70) + _retyped("file", yaml.safe_load(PAGE), 30, _written)
    found += _damaged("rows", f"{json.dumps(ROW)}\n" * 2, 40)
    found += _retyped("rows", ROW, 60, _as_json)
    for kind, page in (("tools", TOOLS), ("users", USERS), ("stages", PIPELINE)):
        found += _damaged(kind, page, 14) + _retyped(kind, yaml.safe_load(page), 14, _written)
    found += _damaged("servers", SERVERS, 10)
    found += _retyped("servers", json.loads(SERVERS), 10, _as_json)
    found += _damaged("address", ADDRESS, 20)
    return [
        BadInput(number=number, kind=kind, text=text, key=key)
        for number, (kind, text, key) in enumerate(found)
    ]


def laid_out(case: BadInput, folder: Path) -> tuple[list[Path], list[str]]:
    """Files and overrides of a check of the case; what it needs is written below the folder."""
    data = case.text.encode() if isinstance(case.text, str) else case.text
    path = folder / ("bad.jsonl" if case.kind == "rows" else "bad.yaml")
    path.write_bytes(data)
    turns = f"{ROLLOUT}.multi_turn"
    match case.kind:
        case "key":
            return [], [*WORDS, f"{case.key}={case.text}"]
        case "address":
            return [], [*WORDS, f"data.train_files={json.dumps(data.decode(errors='replace'))}"]
        case "rows":
            return [], [*WORDS, f"data.train_files={path}"]
        case "tools" | "users":
            key = "tool_config_path" if case.kind == "tools" else "interaction_config_path"
            return [], [*WORDS, f"{turns}.enable=true", f"{turns}.{key}={path}"]
        case "servers":
            path.rename(folder / "servers.json")
            listed = folder / "tools.yaml"
            listed.write_text("tools: [{mcp: {mcp_servers_config_path: servers.json}}]\n")
            return [], [*WORDS, f"{turns}.enable=true", f"{turns}.tool_config_path={listed}"]
        case _:
            return [path], []
