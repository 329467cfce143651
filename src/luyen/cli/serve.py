"""`luyen serve`: an OpenAI-compatible server over a checkpoint or a model."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, final

import typer

from luyen.base.errors import UserError
from luyen.cli.common import Checkpoint, Trust, prepare

if TYPE_CHECKING:
    from luyen.serve.canary_decision import CanaryLimits
    from luyen.serve.canary_service import CanaryOptions, CanaryService
    from luyen.serve.dispatch import ServeLimits
    from luyen.serve.scoring import ScoreService
    from luyen.serve.server import Access
    from luyen.serve.service import Service

_ROLLOUT = "actor_rollout_ref.rollout"
_SHARE, _CANARY_LOG = 0.1, Path("canary.jsonl")
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
KEY_VARIABLE, ADMIN_VARIABLE = "LUYEN_API_KEY", "LUYEN_ADMIN_KEY"


@final
class EngineOptions(NamedTuple):
    """Options of the engine; None keeps the value of the run or of the model.

    Example:
        >>> EngineOptions(max_num_seqs=8).overrides()
        ['actor_rollout_ref.rollout.max_num_seqs=8']
    """

    dtype: str | None = None
    """Type of the weights."""
    device: str | None = None
    """Where the model runs."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer."""
    max_num_seqs: int | None = None
    """Most answers that are generated at once."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for weights and cache."""
    tool_format: str | None = None
    """Format of tool calls."""

    def overrides(self) -> list[str]:
        """The options as keys of the configuration."""
        keys: dict[str, Any] = {
            "actor_rollout_ref.model.dtype": self.dtype,
            "trainer.device": self.device,
            f"{_ROLLOUT}.max_model_len": self.max_model_len,
            f"{_ROLLOUT}.max_num_seqs": self.max_num_seqs,
            f"{_ROLLOUT}.gpu_memory_utilization": self.gpu_memory_utilization,
            f"{_ROLLOUT}.multi_turn.format": self.tool_format,
        }
        return [f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None]


def demand_extra() -> None:
    """A UserError where the packages of the extra `serve` are missing."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        why = "a server takes packages that are not installed"
        raise UserError("luyen serve", ", ".join(missing), why, "pip install luyen[serve]")


def start_message(
    url: str, service: "Service | ScoreService | CanaryService", *, has_key: bool
) -> str:
    """What is printed once the server answers."""
    messages = [{"role": "user", "content": "1+2="}]
    path = "/v1/chat/completions"
    if path not in service.endpoints().jobs:
        path, messages = "/v1/score", [*messages, {"role": "assistant", "content": "3"}]
    name, digest = service.model.name, service.model.digest
    body = json.dumps({"model": name, "messages": messages})
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    return (
        f"serving {name} ({digest}) at {url}/v1\n"
        f"  curl {url}{path}{key} -H 'Content-Type: application/json' "
        f"-d '{body}'\nCtrl-C or SIGTERM ends it, after running requests are answered"
    )


def run_serve(
    checkpoint: str,
    overrides: Sequence[str],
    access: "Access",
    limits: "ServeLimits",
    *,
    name: str | None,
    drain_s: int,
    is_trusted: bool,
    canary: "CanaryOptions | None" = None,
) -> int:
    """Bind, load, serve; the exit code."""
    from luyen.serve.app import Gate, build_app
    from luyen.serve.canary_service import open_canary
    from luyen.serve.opening import Opening, open_service
    from luyen.serve.server import open_socket, url_of
    from luyen.serve.server import serve as serve_until_signal

    access.refuse_exposure()
    opened = open_socket(access)  # before the model is loaded, which takes long
    with opened:
        opening = Opening(name=name, overrides=tuple(overrides), is_trusted=is_trusted)
        if canary is None:
            service = open_service(checkpoint, opening, limits)
        else:
            service = open_canary(checkpoint, opening, limits, canary)
        app = build_app(service, Gate(keys=access.keys, admin_keys=access.admin_keys))
        has_key = not access.keys.is_empty
        said = start_message(url_of(opened), service, has_key=has_key)
        return serve_until_signal(app, opened, drain_s=drain_s, ready=lambda: typer.echo(said))


def canary_options(
    path: str | None,
    limits: "CanaryLimits",
    log: Path,
    reward_range: tuple[float, float] | None,
) -> "CanaryOptions | None":
    """The second model; None without one, and a UserError for options that are about one."""
    from luyen.serve.canary_decision import CanaryLimits
    from luyen.serve.canary_service import CanaryOptions

    if path is not None:
        return CanaryOptions(path=path, limits=limits, log=log, reward_range=reward_range)
    if limits != CanaryLimits(share=_SHARE) or log != _CANARY_LOG or reward_range is not None:
        why = "there are options of a comparison, and no second checkpoint"
        raise UserError("--canary", None, why, "name one, or leave those options out")
    return None


Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(help="Further KEY=VALUE over the configuration.", metavar="[KEY=VALUE]..."),
]
Host: TypeAlias = Annotated[
    str, typer.Option(help="Address to bind to; other than loopback it takes an API key.")
]
Port: TypeAlias = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")]
Name: TypeAlias = Annotated[
    str | None, typer.Option(help="Name of the model in requests; default: CHECKPOINT.")
]
Dtype: TypeAlias = Annotated[
    str | None, typer.Option(help="float32 or bfloat16; default: as the run says.")
]
Device: TypeAlias = Annotated[
    str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")
]
MaxModelLen: TypeAlias = Annotated[
    int | None, typer.Option(min=2, help="Most tokens of prompt and answer together.")
]
MaxNumSeqs: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Most answers that are generated at once.")
]
MemoryShare: TypeAlias = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Share of a GPU for weights and cache; with --canary each model has half of it.",
    ),
]
ToolFormat: TypeAlias = Annotated[
    str | None, typer.Option(help="Format of tool calls, e.g. hermes; default: the run's.")
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(help=f"File of mode 600 with one API key a line, besides ${KEY_VARIABLE}."),
]
AdminKeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(help=f"The same for keys that may change weights, besides ${ADMIN_VARIABLE}."),
]
Anonymous: TypeAlias = Annotated[
    bool, typer.Option("--allow-anonymous", help="Let other machines call without a key.")
]
MaxQueue: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Most open answers; further requests get status 429.")
]
Timeout: TypeAlias = Annotated[
    float, typer.Option(min=0.1, help="Most seconds of a request; then status 504.")
]
MaxBody: TypeAlias = Annotated[
    float, typer.Option(min=0.001, help="Most megabytes of a request; then status 413.")
]
Drain: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Seconds that running requests get at the end.")
]
Canary: TypeAlias = Annotated[
    str | None,
    typer.Option(help="A second checkpoint that answers a share of the callers (docs/canary.md)."),
]
Share: TypeAlias = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="--canary: its share of the callers, between 0 and 1."),
]
CanaryLogFile: TypeAlias = Annotated[
    Path, typer.Option(help="--canary: file of scores and decisions; a restart goes on with it.")
]
ErrorRate: TypeAlias = Annotated[
    float,
    typer.Option(
        min=1e-9, max=0.5, help="--canary: most probability of each of the two wrong decisions."
    ),
]
MinGain: TypeAlias = Annotated[
    float, typer.Option(min=0.0, max=0.99, help="--canary: promoted when better by more than this.")
]
MaxLoss: TypeAlias = Annotated[
    float,
    typer.Option(min=0.0, max=0.99, help="--canary: rolled back when worse by more than this."),
]
MaxPairs: TypeAlias = Annotated[
    int, typer.Option(min=1, help="--canary: rolled back after so many pairs without a decision.")
]
RewardRange: TypeAlias = Annotated[
    tuple[float, float] | None,
    typer.Option(
        help="--canary: LOW HIGH of the candidate's reward, which then scores; else: votes.",
        metavar="LOW HIGH",
    ),
]


def serve(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    dtype: Dtype = None,
    device: Device = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    gpu_memory_utilization: MemoryShare = 0.9,
    tool_format: ToolFormat = None,
    api_key_file: KeyFile = None,
    admin_key_file: AdminKeyFile = None,
    allow_anonymous: Anonymous = False,
    max_queue: MaxQueue = 1024,
    timeout: Timeout = 600.0,
    max_body_mb: MaxBody = 8.0,
    drain: Drain = 30,
    canary: Canary = None,
    share: Share = _SHARE,
    canary_log: CanaryLogFile = _CANARY_LOG,
    error_rate: ErrorRate = 0.05,
    min_gain: MinGain = 0.0,
    max_loss: MaxLoss = 0.0,
    max_pairs: MaxPairs = 10_000,
    reward_range: RewardRange = None,
    trust: Trust = False,
) -> None:
    """Serve a checkpoint or a model over HTTP, as OpenAI's API does."""
    demand_extra()
    prepare()  # before torch is imported
    from luyen.serve.access import read_keys
    from luyen.serve.canary_decision import CanaryLimits
    from luyen.serve.dispatch import ServeLimits
    from luyen.serve.server import Access

    bounds = CanaryLimits(
        share=share,
        error_rate=error_rate,
        min_gain=min_gain,
        max_loss=max_loss,
        max_pairs=max_pairs,
    )
    second = canary_options(canary, bounds, canary_log, reward_range)
    keys = read_keys(KEY_VARIABLE, api_key_file, option="--api-key-file")
    admin_keys = read_keys(ADMIN_VARIABLE, admin_key_file, option="--admin-key-file")
    access = Access(
        host=host, port=port, keys=keys, admin_keys=admin_keys, allow_anonymous=allow_anonymous
    )
    size = int(max_body_mb * 1_000_000)
    limits = ServeLimits(max_queue=max_queue, timeout_s=timeout, max_body_bytes=size)
    memory = gpu_memory_utilization / (1 if second is None else 2)
    engine = EngineOptions(dtype, device, max_model_len, max_num_seqs, memory, tool_format)
    words = [*engine.overrides(), *(overrides or [])]
    code = run_serve(
        checkpoint,
        words,
        access,
        limits,
        name=name,
        drain_s=drain,
        is_trusted=trust,
        canary=second,
    )
    raise typer.Exit(code)
