"""A server's HTTP protocol as pure functions: our records to its requests, its replies to ours.

A dialect sends nothing and holds no state. `luyen.rollout.servers.engine` sends its calls,
validates the replies and recovers from faults, the same for every server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final

from luyen.rollout.protocol import Ending, Sampling

T = TypeVar("T")
Method: TypeAlias = Literal["GET", "POST"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One HTTP request to a server.

    Example:
        >>> HttpCall(path="/health", method="GET").body is None
        True
    """

    path: str
    """Path and query, from the root of the server."""
    method: Method = "POST"
    """The verb."""
    body: Mapping[str, Any] | None = None
    """JSON body; None: an empty one."""
    timeout_s: float | None = None
    """Most seconds until the reply is complete; None: as the engine is configured."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a server says it generated for one request, not validated yet.

    Example:
        >>> Generated(tokens=(5,), logps=(-0.1,), reason="stop").version is None
        True
    """

    tokens: tuple[int, ...]
    """Generated tokens, a stop token included."""
    logps: tuple[float | None, ...]
    """One per token, under the temperature-scaled full softmax (greedy: unscaled)."""
    reason: Ending
    """Why it ended."""
    model: str | None = None
    """Name of the model that generated; None: the server does not say."""
    version: str | None = None
    """Version of the weights; None: replies do not say."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself.

    Example:
        >>> ServerFacts(model="policy", max_model_len=64).max_model_len
        64
    """

    model: str | None
    """Name of its model."""
    max_model_len: int | None = None
    """Most tokens of a sequence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """Name, type and shape of a tensor in transit.

    Example:
        >>> TensorForm(name="lm_head.weight", dtype="float32", shape=(64, 32)).dtype
        'float32'
    """

    name: str
    """Its name in a Hugging Face checkpoint."""
    dtype: str
    """Its type, without `torch.`."""
    shape: tuple[int, ...]
    """Its shape."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A process group of the trainer, which is rank 0, and the workers of a server.

    Example:
        >>> WeightGroup(address="127.0.0.1", port=4000, size=2, backend="gloo").size
        2
    """

    address: str
    """Where rank 0 listens."""
    port: int
    """Its port."""
    size: int
    """All ranks: the trainer and every worker."""
    backend: Literal["gloo", "nccl"]
    """gloo for CPUs, nccl for GPUs."""
    timeout_s: float = 120.0
    """Longest wait of one rank for another."""


@final
class ServerFault(Exception):
    """A server did not do what was asked of it; the engine asks again, or gives up.

    Example:
        >>> str(ServerFault("http_500", "out of memory"))
        'http_500: out of memory'
        >>> ServerFault("http_400", "no such field").is_refusal
        True
    """

    def __init__(self, kind: str, detail: str) -> None:
        """`kind`: `connection`, `timeout`, `http_STATUS`, `not_json`, `shape` or `reply`."""
        super().__init__(f"{kind}: {detail}")
        self.kind = kind

    @property
    def is_refusal(self) -> bool:
        """Whether the server understood the request and will refuse it again."""
        return self.kind.startswith("http_4") and self.kind not in ("http_408", "http_429")

    @property
    def may_be_dead(self) -> bool:
        """Whether the server may be gone, or its engine: no reply, or one of status 500 to 599."""
        return self.kind in ("connection", "timeout") or self.kind.startswith("http_5")


class ServerDialect(Protocol):
    """The protocol of one kind of server. A route that a server lacks is None, or no calls."""

    @property
    def name(self) -> str:
        """Its name in messages: `vllm`, `sglang`, `openai`."""
        ...

    def refusal(self, sampling: Sampling) -> str | None:
        """Why samples of the full softmax would come without its log-probabilities; None: they do.

        Nothing is asked about truncation: a server does not say how much probability it leaves.
        """
        ...

    def generate(
        self, id: str, tokens: Sequence[int], sampling: Sampling, *, seed: int, model: str | None
    ) -> HttpCall:
        """Generate one sample. `seed` has 62 bits; `model` is the name in `ServerFacts`."""
        ...

    def generated(self, reply: Any) -> Generated:
        """Read the reply of `generate`; a ServerFault `shape` if it is not one."""
        ...

    def health(self) -> HttpCall:
        """Answers with success once the server is ready."""
        ...

    def facts(self) -> HttpCall:
        """Asks which model is served."""
        ...

    def read_facts(self, reply: Any) -> ServerFacts:
        """Read the reply of `facts`; a ServerFault `shape` if it is not one."""
        ...

    def abort(self, ids: Sequence[str]) -> Sequence[HttpCall]:
        """Stop requests, whose replies then hold what there is; empty: drop their connections."""
        ...

    def pause(self) -> Sequence[HttpCall]:
        """Stop generating and forget cached keys, before weights change."""
        ...

    def resume(self) -> Sequence[HttpCall]:
        """Generate again, after weights have changed."""
        ...

    def sleep(self) -> Sequence[HttpCall]:
        """Give the memory of the idle server back."""
        ...

    def wake(self) -> Sequence[HttpCall]:
        """Take the memory again."""
        ...

    def load_folder(self, folder: Path, version: int) -> Sequence[HttpCall]:
        """Load the safetensors files of a folder in Hugging Face's layout; empty: it cannot."""
        ...

    def load_adapter(self, name: str, folder: Path) -> HttpCall | None:
        """Load the LoRA adapter of a folder, which is then the model of this name; None: cannot."""
        ...

    def unload_adapter(self, name: str) -> HttpCall | None:
        """Forget an adapter; None: the server forgets by itself."""
        ...

    def join_group(self, group: WeightGroup) -> HttpCall | None:
        """Let every worker of the server join a process group; None: it cannot."""
        ...

    def group_prefixes(self, backend: str) -> Sequence[str]:
        """What the workers put before the keys of the group in its store, from outside in."""
        ...

    def receive(self, tensors: Sequence[TensorForm], version: int) -> HttpCall:
        """Let the workers receive tensors from rank 0 of the group, in this order, and load them.

        The reply comes when they are loaded.
        """
        ...

    def map_tensors(self, handles: Sequence[Sequence[Any]], version: int) -> HttpCall | None:
        """Let the workers load tensors of this GPU, each a name and its handle; None: they cannot.

        The reply comes when they are loaded, and the memory may change.
        """
        ...

    def digests(self) -> HttpCall | None:
        """Asks for digests of the tensors that were loaded last; None: the server has none."""
        ...

    def read_digests(self, reply: Any) -> Mapping[str, str]:
        """Read the reply of `digests`: `luyen.models.weights.tensor_digests`' texts."""
        ...

    def weight_version(self) -> HttpCall | None:
        """Asks which version of the weights is loaded; None: the server does not know."""
        ...

    def read_weight_version(self, reply: Any) -> str:
        """Read the reply of `weight_version`."""
        ...


def member(reply: Any, *path: str | int) -> Any:
    """A value inside a reply; a ServerFault `shape` if it is not there.

    Example:
        >>> member({"choices": [{"index": 0}]}, "choices", 0, "index")
        0
    """
    found = reply
    for step in path:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError) as error:
            place = ".".join(map(str, path))
            raise ServerFault("shape", f"no {place} in {str(reply)[:160]}") from error
    return found


def read_reply(read: Callable[[Any], T], reply: Any) -> T:
    """What `read` finds in a reply; a ServerFault `shape` where the reply is of another form.

    A reply is JSON of any form, and a reader need not expect each of them.

    Example:
        >>> read_reply(lambda reply: reply["a"].upper(), {"a": "b"})
        'B'
        >>> read_reply(lambda reply: reply["a"].upper(), {"a": 1})
        Traceback (most recent call last):
        ...
        luyen.rollout.servers.dialect.ServerFault: shape: AttributeError in {'a': 1}
    """
    try:
        return read(reply)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as e:
        shown = str(reply)[:160]
        raise ServerFault("shape", f"{type(e).__name__} in {shown}") from e


def optional_count(value: Any) -> int | None:
    """A whole number above 0 of a reply, or None; a ServerFault `shape` for anything else.

    Example:
        >>> optional_count(64), optional_count(None)
        (64, None)
    """
    if value is None or (type(value) is int and value > 0):
        return value
    raise ServerFault("shape", f"{str(value)[:80]!r} is no number of tokens")
