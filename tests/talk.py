"""Conversations with a policy that says what a script says: the engine's side of a test."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luyen.base.records import GroupId, Prompt, make_prompt
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rollout.build import tool_parsers
from luyen.rollout.client import EngineClient
from luyen.rollout.conversation_config import ConversationConfig, PromptTokenCache
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.env.protocol import Env, Observation
from luyen.rollout.multi_turn import FaultPolicy, run_conversations
from luyen.rollout.parsers.protocol import ToolParser
from luyen.rollout.protocol import Completion, Request, Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.transcript import check_retokenization
from luyen.telemetry.journal import WorkJournal

TOKENIZER = load_tokenizer("builtin://arithmetic")
HERMES = tool_parsers.get("hermes")
FOUR_CALLS = TurnLimits(max_parallel_calls=4)
KEEP = FaultPolicy(on_fault="keep_min")
Script = Callable[[str, int], str]
"""What the policy says to a conversation (as text, special tokens spelled), for a sample's key."""


@dataclass
class _Row:
    request: Request
    sample: int
    tokens: list[int]
    said: int = 0


class ScriptedEngine:
    """Draws the tokens of scripted lines, one of each running answer at every pass."""

    def __init__(self, script: Script, tokenizer: Tokenizer = TOKENIZER) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._rows: deque[_Row] = deque()
        self.requests: list[Request] = []
        self.passes = 0

    @property
    def is_idle(self) -> bool:
        return not self._rows

    @property
    def is_batch_invariant(self) -> bool:
        return True

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        text = self._tokenizer.decode(request.tokens, skip_special=False)
        for sample, key in enumerate(request.keys):
            line = self._script(text, key)
            self._rows.append(_Row(request, sample, self._tokenizer.encode(line)))

    def advance(self) -> list[Completion]:
        self.passes += 1
        done: list[Completion] = []
        for row in list(self._rows):
            row.said += 1
            limit = row.request.sampling.max_new_tokens
            if row.said >= min(len(row.tokens), limit):
                self._rows.remove(row)
                ended = row.tokens[row.said - 1] in row.request.sampling.stop_ids
                done.append(self._completion(row, "stop" if ended else "length"))
        return done

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        meant = [r for r in self._rows if r.request.id == request and sample in (None, r.sample)]
        for row in meant:
            self._rows.remove(row)
        return [self._completion(row, "aborted") for row in meant]

    def close(self) -> None:
        self._rows.clear()

    def _completion(self, row: _Row, reason) -> Completion:
        tokens = tuple(row.tokens[: row.said])
        logps = tuple(-0.25 * (i + 1) for i in range(len(tokens)))
        return Completion(
            request=row.request.id, sample=row.sample, tokens=tokens, logps=logps, reason=reason
        )


class World:
    """Says `more` once, rewards both turns and the whole."""

    tools = ()

    def __init__(self) -> None:
        self.closed = 0
        self.turns = 0

    async def open(self, prompt, key):
        del key
        return prompt.messages

    async def act(self, messages):
        self.turns += 1
        if self.turns == 2:
            return Observation(is_done=True, reward=0.5)
        return Observation(messages=({"role": "user", "content": "more"},), reward=0.25)

    async def score(self):
        return 2.0

    async def close(self):
        self.closed += 1


def call(name: str, **arguments) -> str:
    """A tool call in the format of Hermes."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def setting(
    tools: Sequence[Tool] = (),
    *,
    env: Callable[[Prompt], Env | None] | None = None,
    room: int = 400,
    budget_s: float | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    limits: TurnLimits = FOUR_CALLS,
    sanity="strict",
    box: ToolRegistry | None = None,
    parser: ToolParser = HERMES,
) -> ConversationConfig:
    """What conversations have in common, over the built-in tokenizer."""
    renderer = Renderer(tokenizer)
    return ConversationConfig(
        renderer=renderer,
        prompt_cache=PromptTokenCache(renderer),
        parser=parser,
        tools=box or ToolRegistry(tools, max_tool_response_length=80),
        make_env=env or (lambda _: None),
        has_envs=env is not None,
        limits=limits,
        max_prompt_length=1000,
        max_response_length=room,
        time_budget_s=budget_s,
        sanity=sanity,
    )


def draws(how: ConversationConfig, *questions: str, samples: int = 1, **row) -> list[PromptRequest]:
    """What to play so that conversations begin with these questions."""
    prompts = [
        make_prompt(
            [{"role": "user", "content": question}], tools=how.tools.schemas(), extra_info=row
        )
        for question in questions
    ]
    return [
        PromptRequest(group=GroupId(step=0, draw=i, uid=prompt.uid), prompt=prompt, samples=samples)
        for i, prompt in enumerate(prompts)
    ]


def play(
    engine,
    how: ConversationConfig,
    *questions: str,
    samples: int = 1,
    policy: FaultPolicy = KEEP,
    journal: WorkJournal | None = None,
    **row,
) -> list[Group]:
    """The conversations that begin with these questions."""
    stops = how.renderer.tokenizer.stop_ids
    sampling = Sampling(max_new_tokens=how.max_response_length, stop_ids=stops)
    groups = asyncio.run(
        converse(
            engine,
            how,
            draws(how, *questions, samples=samples, **row),
            sampling,
            seed=0,
            purpose="rollout",
            version=3,
            policy=policy,
            journal=journal,
        )
    )
    return [
        replace(g, rollouts=tuple(check_retokenization(r, g.prompt, how) for r in g.rollouts))
        for g in groups
    ]


async def converse(engine, *arguments, **more) -> list[Group]:
    """Conversations with an engine that nobody else asks."""
    client = EngineClient(engine)
    async with client.running():
        return await run_conversations(client, *arguments, **more)
