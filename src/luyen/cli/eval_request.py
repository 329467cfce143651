"""What a user asks of `luyen eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.errors import UserError


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
    overrides: tuple[str, ...] = ()
    """`key=value` over its configuration."""
    against: str | None = None
    """What it is compared with."""
    compare: tuple[Path, Path] | None = None
    """Two files of samples to compare, without any model."""
    config: tuple[Path, ...] = ()
    """Files that say rows, reward and draws in place of the run's own."""
    data: tuple[str, ...] = ()
    """Rows in place of `data.val_files`."""
    reward: str | None = None
    """The rule that judges in place of `reward`."""
    samples: int | None = None
    """Samples of each prompt."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Likeliest tokens of this total mass."""
    k: str | None = None
    """The k of pass@k and maj@k, with commas; None: 1, 2, 4 and so on."""
    solved_at: float = 1.0
    """The reward from which on a sample counts as solved."""
    as_json: bool = False
    """Print data."""
    out: Path | None = None
    """Where the report goes."""
    samples_out: Path | None = None
    """Where every rollout goes."""
    shown: int = 3
    """Prompts shown, and prompts that flipped."""
    is_trusted: bool = False
    """Whether code that a run of somebody else names may run."""

    def ks(self, most: int) -> tuple[int, ...]:
        """Every k that is asked for, out of `most` samples; a UserError where one cannot be."""
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

    def demand_sense(self) -> None:
        """A UserError where the options do not go together, before anything is loaded."""
        if (self.checkpoint is None) == (self.compare is None):
            why = "either a checkpoint is measured, or two files of samples are compared"
            fix = "give CHECKPOINT, or --compare A.jsonl B.jsonl"
            raise UserError("CHECKPOINT", self.checkpoint, why, fix)
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
