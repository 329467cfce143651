"""A chat with a policy that only appends tokens; past turns are never tokenised again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message, ToolCall, make_prompt
from luyen.base.seeds import derive_key
from luyen.config.schema.actor_rollout_ref import MultiTurnConfig
from luyen.data.render import Renderer, assistant_message, tool_message
from luyen.pipeline.policy_loading import LoadedPolicy
from luyen.rollout.build import build_tool_environment
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.parsers.protocol import ParsedTurn, tool_parsers
from luyen.rollout.protocol import Request, Sampling, generate
from luyen.train.builders.roles import validation_sampling

_MAX_TOKENS = 4096
"""Most tokens of a conversation: the cache of keys and values is laid out for them."""
_MAX_ROUNDS = 16
"""Most turns of the policy for one message, where the run has no limit of its own."""


@final
class ChatTools:
    """The tools of a run in a chat: reads calls out of a turn and makes them.

    Sessions of tools last as long as the chat. Environments of the run have no part in it, since
    the user answers in their place.
    """

    def __init__(self, multi_turn: MultiTurnConfig) -> None:
        """A UserError where the run has no tools, or where one cannot be loaded."""
        registry = build_tool_environment(multi_turn).tools if multi_turn.enable else None
        if registry is None or not registry.names:
            why = "the run has no tools"
            raise UserError("tools", None, why, "begin a chat without tools")
        self.schemas = registry.schemas()
        self.rounds = multi_turn.max_assistant_turns or _MAX_ROUNDS
        self.parse = tool_parsers.get(multi_turn.format)
        self._parallel = multi_turn.max_parallel_calls
        self._registry = registry
        self._runner = asyncio.Runner()
        self._sessions = self._runner.run(registry.open(make_prompt([]), 0))

    def call(self, parsed: ParsedTurn, turn: int) -> list[ToolCall]:
        """Make the calls of a turn; those that cannot be made say why."""

        async def every() -> list[ToolCall]:
            wanted = parsed.calls[: self._parallel]
            return await asyncio.gather(
                *(self._sessions.call(call, turn, index) for index, call in enumerate(wanted))
            )

        made = self._runner.run(every())
        refused = [
            self._sessions.refused(call, "the call was not made: too many calls", turn)
            for call in parsed.calls[self._parallel :]
        ]
        broken = [self._sessions.malformed(problem, turn) for problem in parsed.problems]
        return [*made, *refused, *broken]

    def replies(self, parsed: ParsedTurn, calls: Sequence[ToolCall], turn: int) -> list[Message]:
        """What the policy reads about its calls."""
        complaints = [call.result for call in calls[len(parsed.calls) :]]
        if not parsed.calls:  # a template has no place for a tool's message without a call
            return [{"role": "user", "content": "\n".join(complaints)}]
        texts = [call.result for call in calls[: len(parsed.calls)]]
        texts[-1] = "\n".join([texts[-1], *complaints])
        pairs = enumerate(zip(parsed.calls, texts, strict=True))
        return [tool_message(call.name, text, turn=turn, index=i) for i, (call, text) in pairs]

    def close(self) -> None:
        """Release the sessions and close the tools."""

        async def end() -> None:
            await self._sessions.release()
            await self._registry.close()

        self._runner.run(end())
        self._runner.close()


@final
class ChatSession:
    """Turns of a user and a policy, as messages and as the token ids the policy saw and sampled."""

    def __init__(
        self,
        opened: LoadedPolicy,
        *,
        system: str | None,
        temperature: float,
        max_tokens: int | None,
        tools: ChatTools | None = None,
    ) -> None:
        """`system` None: the run's `data.system_prompt`; an empty text: no system message.

        `max_tokens` bounds one turn; None: as long as the run's responses. `tools` are offered to
        the policy, and its calls are made; the caller closes them.
        """
        self._tools = tools
        data = opened.config.data
        config: Any = opened.policy.model.config.get_text_config()
        self._limit = min(
            _MAX_TOKENS, config.to_dict().get("max_position_embeddings") or _MAX_TOKENS
        )
        self._renderer = Renderer(opened.tokenizer, template_kwargs=data.apply_chat_template_kwargs)
        make = NativeEngine if opened.policy.is_packed else HfEngine
        self._engine = make(
            opened.policy,
            max_model_len=self._limit,
            max_num_seqs=1,
            max_num_batched_tokens=self._limit,
            decode=self._stream,
        )
        self._most = max_tokens or data.max_response_length
        # Answers end as those of the run's validation do.
        ends = validation_sampling(opened.config, opened.tokenizer)
        self._sampling = replace(ends, temperature=temperature, top_k=-1, top_p=1.0, min_p=0.0)
        self._seed = opened.config.trainer.seed
        self.messages: list[Message] = []
        prompt = data.system_prompt if system is None else system
        if prompt:
            self.messages.append({"role": "system", "content": prompt})
        self.tokens: list[int] = []
        self.sampled = 0
        """Tokens of the last answer."""
        self._turns = 0
        self._shown = ""
        self._show: Callable[[str], None] = lambda _: None

    def say(
        self,
        text: str,
        *,
        show: Callable[[str], None] = lambda _: None,
        called: Callable[[ToolCall], None] = lambda _: None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The policy's answer, its last turn where it calls tools first.

        `show` gets the pieces of every turn as they come, `called` every call with its result.
        Temperature and length are those of the session unless given for this answer.
        """
        self.sampled, self._show = 0, show
        new: list[Message] = [{"role": "user", "content": text}]
        tools = self._tools
        for number in range(1, (tools.rounds if tools is not None else 1) + 1):
            written = self._generate(new, temperature, max_tokens)
            answer, turn = self._shown, self._turns
            self._turns += 1
            if tools is None:
                self.messages.append({"role": "assistant", "content": answer})
                return answer
            parsed = tools.parse(written)
            named = [(call.name, call.arguments) for call in parsed.calls]
            self.messages.append(
                assistant_message(parsed.content, named, turn=turn, written=written)
            )
            if number == tools.rounds or not (parsed.calls or parsed.problems):
                return answer
            calls = tools.call(parsed, turn)
            for call in calls:
                called(call)
            new = tools.replies(parsed, calls, turn)
        raise AssertionError("the last turn returns")

    def _generate(
        self, new: Sequence[Message], temperature: float | None, max_tokens: int | None
    ) -> str:
        """One turn of the policy after new messages, as it was written, special tokens included."""
        tokens = self._with(new)
        room = min(max_tokens or self._most, self._limit - len(tokens))
        if room < 1:
            why = f"the conversation has {len(tokens)} tokens and the model reads {self._limit}"
            raise UserError("message", new[-1]["content"], why, "begin a new conversation")
        self._shown = ""
        key = derive_key(self._seed, "chat", self._turns)
        sampling = self._streamed_sampling(room)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        request = Request(id="chat", tokens=tuple(tokens), keys=(key,), sampling=sampling)
        sampled = generate(self._engine, [request])["chat", 0].tokens
        answer = self._renderer.text_of(sampled)
        self._show(answer[len(self._shown) :])
        self._shown = answer
        self.tokens, self.sampled = [*tokens, *sampled], self.sampled + len(sampled)
        self.messages += new
        tokenizer = self._renderer.tokenizer
        said = sampled[:-1] if sampled and sampled[-1] in tokenizer.stop_ids else sampled
        return tokenizer.decode(said, skip_special=False)

    def _with(self, new: Sequence[Message]) -> list[int]:
        """Token ids of the conversation with new messages; earlier ids never change."""
        tools = self._tools.schemas if self._tools is not None else ()
        if not self.tokens:
            return self._renderer.prompt_tokens([*self.messages, *new], tools)
        more = self._renderer.extend(self.tokens, self.messages, new, tools)
        return [*more.tokens] if more.restart is not None else [*self.tokens, *more.tokens]

    def _streamed_sampling(self, room: int) -> Sampling:
        """Sampling parameters under which the engine calls `_stream` after every token.

        With a stop string the engine decodes as many last tokens as the string is long; this one is
        as long as the response, and never occurs in it.
        """
        strings = (*self._sampling.stop_strings, "\0" * room)
        return replace(self._sampling, max_new_tokens=room, stop_strings=strings)

    def _stream(self, sampled: Sequence[int]) -> str:
        """Show new text, without an incomplete last character; returns the decoded tokens."""
        text = self._renderer.text_of(sampled)
        if text.startswith(self._shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(text[len(self._shown) :])
            self._shown = text
        return self._renderer.tokenizer.decode(sampled, skip_special=False)
