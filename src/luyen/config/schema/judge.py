"""`judge`: a language model that is asked how good an answer is, and the cache of what it said."""

import re
from typing import Annotated, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from luyen.config.schema.block import Block, Pair, key

ENGINE = "engine://"
"""The `base_url` that means the rollout engine of the run, with the weights of the policy."""


def _as_texts(value: object) -> object:
    """YAML reads `yes:` and `1:` as other types; a choice is the text that was written."""
    if not isinstance(value, dict):
        return value
    named = cast(dict[object, object], value)
    words: dict[object, str] = {True: "yes", False: "no"}
    return {words[n] if isinstance(n, bool) else str(n): score for n, score in named.items()}


class Judge(Block):
    """A model behind an OpenAI-compatible endpoint, as written under a component's `judge`."""

    base_url: str = key(..., "Endpoint up to `/v1`, or `engine://` for the run's own engine.")
    model: str = key("policy", "Name of the model at the endpoint.", min_length=1)
    api_key_env: str | None = key(None, "Environment variable that holds the key; null: no key.")
    system: str | None = key(None, "System message of every request.")
    prompt: str = key(
        ..., "What is asked: `{answer}`, `{question}` and `{ground_truth}` are filled in."
    )
    parse: Literal["number", "choice", "regex", "json"] = key(
        "number", "How the score is read out of the reply."
    )
    choices: Annotated[dict[str, float], BeforeValidator(_as_texts)] = key(
        {}, "choice: word of the reply -> score."
    )
    pattern: str | None = key(None, "regex: its first group is the number; the last match counts.")
    json_key: str = key("score", "json: where the number stands; dots lead deeper.", min_length=1)
    scale: Pair | None = key(
        None, "Worst and best number, mapped to 0 and 1; null: any number, as it is."
    )
    timeout_s: float = key(60.0, "Most seconds for one request.", gt=0)
    retries: int = key(3, "More requests for the same score after one that failed.", ge=0)
    temperature: float = key(0.0, "Temperature of the judge.", ge=0)
    max_tokens: int = key(512, "Most tokens of a reply.", ge=1)
    concurrency: int = key(8, "Most requests at once to this endpoint.", ge=1)
    requests_per_minute: float | None = key(
        None, "Most requests a minute to this endpoint; null: as many as there are.", gt=0
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.base_url != ENGINE:
            _check_url(self.base_url)
        if "{answer}" not in self.prompt:
            raise ValueError("prompt does not show {answer}, so every answer would score alike")
        if (self.parse == "choice") != bool(self.choices):
            raise ValueError("choices are needed for parse: choice, and for nothing else")
        if (self.parse == "regex") != (self.pattern is not None):
            raise ValueError("pattern is needed for parse: regex, and for nothing else")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if self.scale is not None and self.parse == "choice":
            raise ValueError("scale has no effect on choices: write the scores you want there")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise ValueError("scale is [worst, best], and worst lies below best")
        return self


def _check_url(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"base_url is no address: {error}") from error
    if not is_sound:
        raise ValueError(f"base_url begins with http:// or https://, or is {ENGINE}")


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from error
    if groups < 1:
        raise ValueError("pattern has no group, and the first one is the number")


class RewardCache(Block):
    """Scores that were computed once, found again by what was judged."""

    enable: bool = key(
        False, "Keep replies of judges and scores of deterministic rules, and use them again."
    )
    path: str | None = key(
        None, "File of the cache, which runs may share; null: one in the run directory."
    )
