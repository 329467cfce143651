"""A chat with a policy that only appends tokens; past turns are never tokenised again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.pipeline.policy_loading import LoadedPolicy
from luyen.rollout.hf_engine import HfEngine
from luyen.rollout.native.engine import NativeEngine
from luyen.rollout.protocol import Request, Sampling, generate
from luyen.train.builders.roles import validation_sampling

_MAX_TOKENS = 4096
"""Most tokens of a conversation: the cache of keys and values is laid out for them."""


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
    ) -> None:
        """`system` None: the run's `data.system_prompt`; an empty text: no system message.

        `max_tokens` bounds one answer; None: as long as the run's responses.
        """
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
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The policy's answer; `show` gets its pieces as they come.

        Temperature and length are those of the session unless given for this answer.
        """
        user: Message = {"role": "user", "content": text}
        tokens = self._with(user)
        room = min(max_tokens or self._most, self._limit - len(tokens))
        if room < 1:
            why = f"the conversation has {len(tokens)} tokens and the model reads {self._limit}"
            raise UserError("message", text, why, "begin a new conversation")
        self._shown, self._show = "", show
        key = derive_key(self._seed, "chat", self._turns)
        sampling = self._streamed_sampling(room)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        request = Request(id="chat", tokens=tuple(tokens), keys=(key,), sampling=sampling)
        sampled = generate(self._engine, [request])["chat", 0].tokens
        answer = self._renderer.text_of(sampled)
        show(answer[len(self._shown) :])
        self.tokens, self.sampled = [*tokens, *sampled], len(sampled)
        self.messages += [user, {"role": "assistant", "content": answer}]
        self._turns += 1
        return answer

    def _with(self, user: Message) -> list[int]:
        """Token ids of the conversation with the new message; earlier ids never change."""
        if not self.tokens:
            return self._renderer.prompt_tokens([*self.messages, user])
        more = self._renderer.extend(self.tokens, self.messages, [user])
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
