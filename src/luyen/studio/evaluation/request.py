"""The options of `luyen eval` as records, and what they may be together."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from luyen.base.errors import UserError


@final
class SamplingOptions(NamedTuple):
    """Options over the sampling of the run's validation; None or empty keeps it.

    Example:
        >>> SamplingOptions(samples=8).top_p is None
        True
    """

    samples: int | None = None
    """Samples of each prompt."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Nucleus sampling mass."""
    min_p: float | None = None
    """Least probability of a token, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""


_AS_CONFIGURED = SamplingOptions()


@final
class EndpointArguments(NamedTuple):
    """Options about an endpoint, as they were given.

    Example:
        >>> EndpointArguments(url="http://127.0.0.1:8000/v1").is_used("runs/a/b")
        True
    """

    url: str | None = None
    """The endpoint that is measured; None: a checkpoint is."""
    model: str | None = None
    """Name of its model; None: the only one that it has."""
    api_key_env: str | None = None
    """Environment variable with the key."""
    concurrent: int | None = None
    """Most requests at once; None: 32."""

    def is_used(self, against: str | None) -> bool:
        """Whether an endpoint is asked, as what is measured or as the baseline."""
        return self.url is not None or (against is not None and is_url(against))


NO_ENDPOINT = EndpointArguments()


def is_url(text: str) -> bool:
    """Whether a text is the address of an endpoint, and no checkpoint."""
    return text.startswith(("http://", "https://"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The options of the command, as they were given.

    Example:
        >>> EvalRequest(checkpoint="runs/a/b", k="1,4").ks(most=8)
        (1, 4)
    """

    checkpoint: str | None = None
    """What is measured."""
    endpoint: EndpointArguments = NO_ENDPOINT
    """The endpoint that is measured in place of a checkpoint."""
    overrides: tuple[str, ...] = ()
    """`key=value` over its configuration."""
    against: str | None = None
    """What it is compared with: a checkpoint, or the address of an endpoint."""
    compare: tuple[Path, Path] | None = None
    """Two files of samples to compare, without any model."""
    config: tuple[Path, ...] = ()
    """YAML files that replace rows, reward and sampling of the run."""
    data: tuple[str, ...] = ()
    """Rows in place of `data.val_files`."""
    reward: str | None = None
    """The rule that replaces `reward`."""
    sampling: SamplingOptions = _AS_CONFIGURED
    """Options over the sampling of the run's validation."""
    k: str | None = None
    """The k of pass@k and maj@k, with commas; None: 1, 2, 4 and so on."""
    solved_at: float = 1.0
    """The reward from which on a sample counts as solved."""
    as_json: bool = False
    """Print data."""
    out: Path | None = None
    """File for the report."""
    samples_out: Path | None = None
    """File for every rollout."""
    shown: int = 3
    """Prompts shown, and prompts that flipped."""
    is_trusted: bool = False
    """Whether code named by a run from another machine may run."""

    def ks(self, most: int) -> tuple[int, ...]:
        """The requested k values; a UserError if one is not between 1 and `most` samples."""
        if self.k is None:
            return tuple(2**i for i in range(most.bit_length()))
        try:
            found = tuple(sorted({int(word) for word in self.k.split(",")}))
        except ValueError:
            raise UserError("--k", self.k, "not numbers with commas", "write e.g. 1,4,8") from None
        if found[0] < 1 or found[-1] > most:
            why = f"each prompt has {most} sample{'' if most == 1 else 's'}"
            raise UserError("--k", self.k, why, f"stay within 1 and {most}, or raise --samples")
        return found

    def validate(self) -> None:
        """A UserError for inconsistent options, before anything is loaded."""
        is_measured = self.checkpoint is not None or self.endpoint.url is not None
        if is_measured == (self.compare is not None):
            why = "either a checkpoint is measured, or two files of samples are compared"
            fix = "give CHECKPOINT, --url ADDRESS, or --compare A.jsonl B.jsonl"
            raise UserError("CHECKPOINT", self.checkpoint, why, fix)
        if not self.endpoint.is_used(self.against) and self.endpoint != NO_ENDPOINT:
            why = "--model, --api-key-env and --concurrent are about an endpoint"
            raise UserError("--url", None, why, "give its address with --url, or drop them")
        if self.compare is not None and (self.against or self.samples_out):
            fix = "leave --against and --samples-out out, or give a checkpoint"
            raise UserError("--compare", None, "files are compared without any model", fix)
        for field, path in (("--out", self.out), ("--samples-out", self.samples_out)):
            if path is not None and not path.parent.is_dir():
                raise UserError(field, str(path), "its folder is not there", "make it first")
        endings = (".jsonl", ".parquet")
        if self.samples_out is not None and self.samples_out.suffix not in endings:
            why = "its ending names no format of samples"
            raise UserError("--samples-out", str(self.samples_out), why, "use .jsonl or .parquet")


def is_override(word: str) -> bool:
    """Whether a word is `key=value`, and no checkpoint.

    Example:
        >>> is_override("trainer.seed=3"), is_override("runs/a=b"), is_override("runs/a")
        (True, False, False)
    """
    return re.match(r"[+~]?[A-Za-z_][\w.]*=", word) is not None
