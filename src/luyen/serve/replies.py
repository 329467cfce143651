"""Generated tokens as replies: text, tool calls, log-probabilities, counts; pure functions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from luyen.base.seeds import derive_key
from luyen.data.tokenizer import Tokenizer
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.prompt_scores import PromptScores
from luyen.rollout.protocol import Completion, TopLogps
from luyen.serve.answer_text import answer_text
from luyen.serve.calls import ChatCall
from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel

_LOGPROB_FLOOR = -9999.0
"""What stands for a probability of 0: JSON has no infinity."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceContent:
    """Text and calls of one choice of a reply.

    Example:
        >>> ChoiceContent(text="7", reason="stop").calls
        ()
    """

    text: str
    """Its text, without the calls."""
    reason: str
    """OpenAI's word for why it ended."""
    calls: tuple[WrittenCall, ...] = ()
    """Tool calls."""


def said_tokens(completion: Completion, job: Job, model: ServedModel) -> tuple[int, ...]:
    """The tokens that are text: all but the one that ended the answer."""
    tokens = completion.tokens
    ends = model.ends | {*job.decoding.stop_token_ids}
    is_ended = completion.reason == "stop" and tokens and tokens[-1] in ends
    return tokens[:-1] if is_ended and not job.decoding.ignore_eos else tokens


def answer_of(completion: Completion, job: Job, model: ServedModel) -> ChoiceContent:
    """Text and calls of a finished answer."""
    # An answer that its form could not be brought to an end of was cut off, too.
    reason = "stop" if completion.reason == "stop" else "length"
    tokens = said_tokens(completion, job, model)
    text = answer_text(job, model)
    whole = text.add(tokens) + text.finish()
    if not isinstance(job.call, ChatCall):
        return ChoiceContent(text=whole, reason=reason)
    choice = job.call.tool_choice
    if choice.mode == "none":
        return ChoiceContent(text=whole, reason=reason)
    turn = model.parser(model.tokenizer.decode(tokens, skip_special=False))
    if not turn.calls:
        return ChoiceContent(text=whole, reason=reason)
    calls = turn.calls if choice.is_parallel else turn.calls[:1]
    return ChoiceContent(text=turn.content, reason="tool_calls", calls=calls)


def tool_calls(answer: ChoiceContent, key: int) -> list[dict[str, Any]]:
    """The calls as OpenAI writes them; ids depend on the answer's random key alone."""
    return [
        {
            # Nine letters and digits: some chat templates refuse anything else.
            "id": f"c{derive_key(key, 'call', index) >> 32:08x}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            },
        }
        for index, call in enumerate(answer.calls)
    ]


def usage(job: Job, completions: Sequence[Completion]) -> dict[str, int]:
    """Counts of tokens; a prompt counts once, however many answers it has."""
    prompt = sum(map(len, job.prompts))
    written = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def envelope(job: Job, model: ServedModel, digest: str, *, object: str) -> dict[str, Any]:
    """What every reply and every chunk begins with."""
    return {
        "id": job.id,
        "object": object,
        "created": job.created,
        "model": model.name,
        "system_fingerprint": digest,
    }


def reply(
    job: Job,
    model: ServedModel,
    completions: Mapping[int, Completion],
    digest: str,
    prompts: Sequence[PromptScores] = (),
) -> dict[str, Any]:
    """The whole reply; `completions` by choice, `prompts` where they are echoed with scores."""
    write = _chat_choice if isinstance(job.call, ChatCall) else partial(_text_choice, prompts)
    count = job.decoding.n * len(job.prompts)
    return {
        **envelope(job, model, digest, object=job.object),
        "choices": [write(job, model, index, completions.get(index)) for index in range(count)],
        "usage": usage(job, [*completions.values()]),
    }


def _chat_choice(
    job: Job, model: ServedModel, index: int, completion: Completion | None
) -> dict[str, Any]:
    assert completion is not None, "a chat always has an answer"
    answer = answer_of(completion, job, model)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        calls = tool_calls(answer, job.requests[0].keys[index])
        message |= {"content": answer.text or None, "tool_calls": calls}
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(Scored.of(completion), job, model.tokenizer),
        "finish_reason": answer.reason,
    }
    if job.reply.return_token_ids:
        choice |= {"token_ids": completion.tokens, "prompt_token_ids": job.prompts[0]}
    return choice


def _text_choice(
    prompts: Sequence[PromptScores],
    job: Job,
    model: ServedModel,
    index: int,
    completion: Completion | None,
) -> dict[str, Any]:
    place = index // job.decoding.n
    call, prompt = job.call, job.prompts[place]
    assert not isinstance(call, ChatCall)
    if completion is None:  # max_tokens 0: the prompt alone
        answer, scored = ChoiceContent(text="", reason="length"), Scored()
    else:
        answer, scored = answer_of(completion, job, model), Scored.of(completion)
    before = ""
    if call.echo:
        given = call.prompts[place]
        decoded = model.tokenizer.decode(prompt, skip_special=job.reply.skip_special_tokens)
        before = given if isinstance(given, str) else decoded
        if prompts:
            found = prompts[place]
            known = Scored(tokens=prompt, logps=found.logps, tops=found.top_logps)
            scored = known.followed_by(scored)
    choice: dict[str, Any] = {
        "index": index,
        "text": before + answer.text,
        "logprobs": text_logprobs(scored, job, model.tokenizer),
        "finish_reason": answer.reason,
    }
    if job.reply.return_token_ids:
        ids = completion.tokens if completion is not None else ()
        choice |= {"token_ids": ids, "prompt_token_ids": prompt}
    return choice


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens with log-probabilities, and the likeliest tokens at each place.

    Example:
        >>> Scored(tokens=(5,), logps=(-0.1,)).followed_by(Scored(tokens=(6,), logps=(-1.0,))).logps
        (-0.1, -1.0)
    """

    tokens: tuple[int, ...] = ()
    """The tokens."""
    logps: tuple[float | None, ...] = ()
    """Log-probability of each; None: it has none, as the first token of a prompt."""
    tops: tuple[TopLogps | None, ...] = ()
    """(id, log-probability) of the likeliest; empty where they were not wanted."""

    @classmethod
    def of(cls, completion: Completion) -> "Scored":
        """The tokens of a completion."""
        return cls(tokens=completion.tokens, logps=completion.logps, tops=completion.top_logps)

    def followed_by(self, more: "Scored") -> "Scored":
        """These tokens, and then `more`."""
        return replace(
            self,
            tokens=self.tokens + more.tokens,
            logps=self.logps + more.logps,
            tops=self.tops + more.tops,
        )


def chat_logprobs(scored: Scored, job: Job, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Log-probabilities in the form of /v1/chat/completions; None where they are not wanted."""
    if job.decoding.top_logprobs is None:
        return None

    def entry(token: int, logp: float | None) -> dict[str, Any]:
        name = _token_name(token, job, tokenizer)
        is_whole = "\N{REPLACEMENT CHARACTER}" not in name
        return {
            "token": name,
            "logprob": _finite(logp),
            "bytes": list(name.encode()) if is_whole and not job.reply.tokens_as_ids else None,
        }

    content: list[dict[str, Any]] = []
    for place, (token, logp) in enumerate(zip(scored.tokens, scored.logps, strict=True)):
        tops = (scored.tops[place] if scored.tops else ()) or ()
        best = [entry(*one) for one in tops[: job.decoding.top_logprobs]]
        content.append({**entry(token, logp), "top_logprobs": best})
    return {"content": content, "refusal": None}


def text_logprobs(
    scored: Scored, job: Job, tokenizer: Tokenizer, *, start: int = 0
) -> dict[str, Any] | None:
    """Log-probabilities in the form of /v1/completions; `start` is the first offset."""
    wanted = job.decoding.top_logprobs
    if wanted is None:
        return None
    names = [_token_name(token, job, tokenizer) for token in scored.tokens]
    offsets: list[int] = []
    for token in scored.tokens:
        offsets.append(start)
        start += len(tokenizer.decode([token], skip_special=False))
    tops: list[dict[str, float | None] | None] = []
    for place, logp in enumerate(scored.logps):
        best = (scored.tops[place] if scored.tops else ()) or ()
        named = {_token_name(token, job, tokenizer): _finite(lp) for token, lp in best[:wanted]}
        # The token itself is always among them, as OpenAI has it.
        named.setdefault(names[place], _finite(logp))
        tops.append(None if logp is None else named)
    return {
        "tokens": names,
        "token_logprobs": [_finite(logp) for logp in scored.logps],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _token_name(token: int, job: Job, tokenizer: Tokenizer) -> str:
    if job.reply.tokens_as_ids:
        return f"token_id:{token}"
    return tokenizer.decode([token], skip_special=False)


def _finite(logp: float | None) -> float | None:
    return None if logp is None else max(logp, _LOGPROB_FLOOR)
