"""OpenAI-compatible completion endpoints that return token ids: a fixed model to sample from.

Token ids are read where an endpoint puts them: `token_ids` of a choice or tokens named `token_id:N`
(vLLM), or the `id` of each scored token (llama.cpp). An endpoint without any is refused: text is
never tokenised again. Stop strings are not sent, because some servers drop the tokens of a stop;
answers are cut here.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, final, get_args

from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.policy import Policy
from luyen.rollout.native.sequences import Decode
from luyen.rollout.protocol import Ending, RolloutEngine, Sampling, rollout_engines
from luyen.rollout.servers.build import ServerPlace, build_server_engine
from luyen.rollout.servers.dialect import (
    Generated,
    HttpCall,
    ServerFacts,
    ServerFault,
    TensorForm,
    WeightGroup,
    member,
    optional_count,
)

Convention = Literal["raw", "processed", "llama_cpp"]
"""What an endpoint reports: log-probabilities before the temperature, or after it; llama.cpp can be
asked for those after it."""
FIELD = "actor_rollout_ref.rollout.engine_kwargs.openai"
_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length"}
_NAMED = "token_id:"
_MOST_SEED = 2**31
_WHY_FIXED = "an OpenAI-compatible endpoint takes no weights"


@final
class OpenAiDialect:
    """Requests and replies of `/v1/completions`.

    Example:
        >>> OpenAiDialect().refusal(Sampling(max_new_tokens=1, temperature=1.0)) is None
        True
    """

    name = "openai"

    def __init__(self, convention: Convention = "raw") -> None:
        if convention not in get_args(Convention):
            why = "a convention of log-probabilities is " + ", ".join(get_args(Convention))
            raise UserError(f"{FIELD}.logprobs", convention, why, "name one of them")
        self._convention: Convention = convention

    def refusal(self, sampling: Sampling) -> str | None:
        """An endpoint may report them before it applies the temperature, or without stop tokens."""
        if self._convention == "llama_cpp" and sampling.ignore_stop:
            return "llama.cpp samples no stop token then, and its probabilities leave them out"
        if self._convention != "raw" or sampling.temperature in (0.0, 1.0):
            return None
        why = "the endpoint reports log-probabilities before the temperature is applied"
        return f"{why}: those of {sampling.temperature:g} cannot be known"

    def generate(
        self, id: str, tokens: Sequence[int], sampling: Sampling, *, seed: int, model: str | None
    ) -> HttpCall:
        """One sample; what only some servers know is ignored by the rest."""
        del id
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(tokens),
            "n": 1,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            # The full softmax; servers have defaults of their own.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": seed % _MOST_SEED,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream": False,
            "ignore_eos": sampling.ignore_stop,
        }
        if not sampling.ignore_stop:
            body["stop_token_ids"] = sorted(sampling.stop_ids)
        if self._convention == "llama_cpp" and sampling.temperature not in (0.0, 1.0):
            body |= {"post_sampling_probs": True, "samplers": ["temperature"]}
        return HttpCall(path="/v1/completions", body=body)

    def generated(self, reply: Any) -> Generated:
        """The only choice of a completion, whichever way it names its tokens."""
        choices = member(reply, "choices")
        if not isinstance(choices, list) or len(cast(list[Any], choices)) != 1:
            raise ServerFault("shape", f"{len(choices)} samples came, and one was wanted")
        choice = cast(list[Any], choices)[0]
        scores = member(choice, "logprobs")
        if scores is None:
            raise ServerFault("shape", "the endpoint returns no log-probabilities")
        if isinstance(scores, dict) and "content" in scores:
            tokens, logps = _scored_tokens(cast(dict[str, Any], scores)["content"])
        else:
            tokens, logps = _listed_tokens(choice, scores)
        _refuse_missing_tokens(reply, len(tokens))
        reason = member(choice, "finish_reason")
        if reason not in _ENDINGS:
            raise ServerFault("shape", f"it ended by {reason!r}")
        found = cast(dict[str, Any], reply).get("model")
        return Generated(
            tokens=tokens,
            logps=logps,
            reason=_ENDINGS[reason],
            model=None if found is None else str(found),
        )

    def health(self) -> HttpCall:
        """The list of models, which every endpoint has."""
        return HttpCall(path="/v1/models", method="GET", timeout_s=10.0)

    def facts(self) -> HttpCall:
        """The same list."""
        return self.health()

    def read_facts(self, reply: Any) -> ServerFacts:
        """The first model of the list; vLLM and llama.cpp add its longest sequence."""
        first = cast(dict[str, Any], member(reply, "data", 0))
        meta = cast(dict[str, Any], first.get("meta") or {})
        longest = first.get("max_model_len") or meta.get("n_ctx")
        name = str(member(first, "id"))
        return ServerFacts(model=name, max_model_len=optional_count(longest))

    def abort(self, ids: Sequence[str]) -> Sequence[HttpCall]:
        """None: connections are dropped, and with them what there was."""
        del ids
        return ()

    def pause(self) -> Sequence[HttpCall]:
        """Nothing to pause for: its weights never change."""
        return ()

    def resume(self) -> Sequence[HttpCall]:
        """Nothing was paused."""
        return ()

    def sleep(self) -> Sequence[HttpCall]:
        """Its memory is its own."""
        return ()

    def wake(self) -> Sequence[HttpCall]:
        """It never sleeps."""
        return ()

    def load_folder(self, folder: Path, version: int) -> Sequence[HttpCall]:
        """It cannot."""
        del folder, version
        return ()

    def load_adapter(self, name: str, folder: Path) -> HttpCall | None:
        """It cannot."""
        del name, folder
        return None

    def unload_adapter(self, name: str) -> HttpCall | None:
        """It has none."""
        del name
        return None

    def join_group(self, group: WeightGroup) -> HttpCall | None:
        """It cannot."""
        del group
        return None

    def group_prefixes(self, backend: str) -> Sequence[str]:
        """There is no group."""
        del backend
        return ()

    def receive(self, tensors: Sequence[TensorForm], version: int) -> HttpCall:
        """It cannot."""
        del tensors, version
        raise UserError("actor_rollout_ref.rollout.name", self.name, _WHY_FIXED, "use vllm")

    def map_tensors(self, handles: Sequence[Sequence[Any]], version: int) -> HttpCall | None:
        """It cannot."""
        del handles, version
        return None

    def digests(self) -> HttpCall | None:
        """It has none."""
        return None

    def read_digests(self, reply: Any) -> Mapping[str, str]:
        """It has none."""
        raise ServerFault("shape", f"unexpected digests: {str(reply)[:80]}")

    def weight_version(self) -> HttpCall | None:
        """Its weights have no version."""
        return None

    def read_weight_version(self, reply: Any) -> str:
        """Its weights have no version."""
        raise ServerFault("shape", f"unexpected version: {str(reply)[:80]}")


def _refuse_missing_tokens(reply: Any, count: int) -> None:
    """Some servers leave tokens without a score out, such as parts of a character."""
    usage = cast(dict[str, Any], reply).get("usage")
    total = cast(dict[str, Any], usage).get("completion_tokens") if usage else None
    if total is not None and total != count:
        raise ServerFault("shape", f"{total} tokens were sampled, and {count} are named")


def _scored_tokens(content: Any) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Tokens and log-probabilities of a list of scored tokens; some have probabilities instead."""
    if not isinstance(content, list):
        raise ServerFault("shape", "the scores of a choice are no list")
    tokens: list[int] = []
    logps: list[float | None] = []
    for entry in cast(list[dict[str, Any]], content):
        name = entry.get("id", entry.get("token"))
        if isinstance(name, str) and name.startswith(_NAMED):
            name = _numbered(name)
        if not isinstance(name, int):
            raise ServerFault("shape", "the endpoint returns no token ids")
        tokens.append(name)
        logps.append(_log(entry["prob"]) if "prob" in entry else member(entry, "logprob"))
    return tuple(tokens), tuple(logps)


def _listed_tokens(choice: Any, scores: Any) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Tokens and log-probabilities of parallel lists."""
    tokens: Any = cast(dict[str, Any], choice).get("token_ids")
    logps, names = member(scores, "token_logprobs"), member(scores, "tokens")
    if tokens is None and all(str(name).startswith(_NAMED) for name in names):
        tokens = [_numbered(str(name)) for name in names]
    if not isinstance(tokens, list) or not isinstance(logps, list):
        raise ServerFault("shape", "the endpoint returns no token ids")
    return tuple(cast(list[int], tokens)), tuple(cast(list[float | None], logps))


def _numbered(name: str) -> int:
    """The id in the name of a token; other digits, signs and blanks are none."""
    digits = name.removeprefix(_NAMED)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
        raise ServerFault("shape", f"{name[:40]!r} names no token")
    return int(digits)


def _log(probability: Any) -> float | None:
    """None for what is no probability above 0."""
    is_number = isinstance(probability, int | float) and probability > 0
    return math.log(probability) if is_number else None


@rollout_engines.register("openai", is_server=True, takes_weights=False)
def openai(
    policy: Policy, rollout: RolloutConfig, *, longest: int, decode: Decode, place: ServerPlace
) -> RolloutEngine:
    """The fixed model of an OpenAI-compatible endpoint at one of `server_urls`.

    The policy lends its vocabulary alone.
    """
    return build_server_engine(
        OpenAiDialect(rollout.server.logprobs),
        launch=None,
        policy=policy,
        rollout=rollout,
        max_model_len=rollout.max_model_len or longest,
        decode=decode,
        place=place,
    )
