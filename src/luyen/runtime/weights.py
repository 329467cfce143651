"""Weights in transit: packed as bytes, in buckets, or as memory of the same GPU; copied into an
engine and digested there.

Pickling a view would send its whole storage; packing sends only its own elements, bit for bit, for
every dtype.
"""

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.weights import Fingerprint, tensor_digests
from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import RemoteEngine, RolloutEngine, drop_prefixes
from luyen.runtime.gpu_memory import MappedWeights, cuda_memory, opened

# Arrays in Ray's object store are read-only, which PyTorch cannot express.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


TensorBytes: TypeAlias = tuple[str, tuple[int, ...], Any]
"""A tensor as its type, its shape and an array of bytes."""


FlatTensors: TypeAlias = tuple[TensorBytes, tuple[tuple[str, tuple[int, ...]], ...]]
"""Tensors of one dtype that are adjacent in memory, as one flat one; names and shapes in order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """A bucket of parameters as bytes.

    Example:
        >>> unpack(pack({"w": torch.ones(2, dtype=torch.bfloat16)}))["w"].dtype
        torch.bfloat16
    """

    stretches: tuple[FlatTensors, ...]
    """The contents; fewer stretches are faster to send."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeights:
    """The policy's weights as gathered from the ranks, to be sent to the replicas.

    Example:
        >>> GatheredWeights(parts=[], bytes=0, seconds=0.1, digests={}).bytes
        0
    """

    parts: Sequence[Any]
    """Buckets of full parameters of the policy: tensors here, or object references."""
    bytes: int
    """Their size."""
    seconds: float
    """Seconds that the ranks took."""
    digests: Mapping[str, str]
    """Type, shape and digest of every trained tensor, computed from the shards of each rank."""
    mapped: MappedWeights | None = None
    """The same parameters in the memory of the first rank, valid until its next step; None: they
    are only in `parts`. `parts` may then be empty."""


WeightForm: TypeAlias = Literal["bytes", "mapped", "both"]
"""What replicas need: buckets of bytes, the memory of a rank on the same GPU, or, where they
differ, both. A rank that cannot be read gathers bytes."""


Gathering: TypeAlias = Callable[[], GatheredWeights]
"""Waits for the ranks and returns the gathered weights."""


def pack(tensors: Mapping[str, Tensor]) -> PackedWeights:
    """Tensors of any device as bytes; tensors adjacent in memory become one stretch.

    Example:
        >>> first, second = torch.arange(6.0).split([2, 4])
        >>> len(pack({"a": first, "b": second}).stretches), len(pack({"b": second}).stretches)
        (1, 1)
    """
    stretches: list[list[tuple[str, Tensor]]] = []
    before: Tensor | None = None
    for name, tensor in tensors.items():
        if before is None or not _follows(tensor, before):
            stretches.append([])
        stretches[-1].append((name, tensor))
        before = tensor
    return PackedWeights(stretches=tuple(_stretch(one) for one in stretches))


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor begins where another one ends, in the same memory."""
    return (
        tensor.dtype == before.dtype
        and tensor.data_ptr() == before.data_ptr() + before.numel() * before.element_size()
        and tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and tensor.is_contiguous()
        and before.is_contiguous()
    )


def _stretch(named: Sequence[tuple[str, Tensor]]) -> FlatTensors:
    first = named[0][1].detach()
    if len(named) > 1:
        first = first.as_strided((sum(tensor.numel() for _, tensor in named),), (1,))
    return tensor_to_bytes(first), tuple((name, tuple(tensor.shape)) for name, tensor in named)


def tensor_to_bytes(tensor: Tensor) -> TensorBytes:
    """A tensor of any device as bytes."""
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def tensor_from_bytes(plain: TensorBytes) -> Tensor:
    """The tensor, without a copy of its bytes."""
    dtype, shape, array = plain
    if not array.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)


def unpack(part: PackedWeights) -> dict[str, Tensor]:
    """The tensors of a part on the CPU, read-only: views of its bytes."""
    found: dict[str, Tensor] = {}
    for plain, contents in part.stretches:
        flat = tensor_from_bytes(plain).reshape(-1)
        sizes = [prod(shape) for _, shape in contents]
        for (name, shape), own in zip(contents, flat.split(sizes), strict=True):
            found[name] = own.view(shape)
    return found


@contextmanager
def readable(part: PackedWeights | MappedWeights) -> Generator[dict[str, Tensor]]:
    """The tensors of a part, valid until the end of the block, on the CPU or on this GPU."""
    if isinstance(part, PackedWeights):
        yield unpack(part)
        return
    with opened(part, cuda_memory()) as found:
        yield found


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Loading weights into an engine.

_FIELD = "actor_rollout_ref.rollout.name"
_FIX = "publish the parameters of the model that the engine was built from"


def copy_into(own: Mapping[str, Tensor | str], given: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters of an engine in place.

    A UserError for a parameter that the engine lacks, or has with another dtype or shape.
    """
    with torch.no_grad():
        for name, tensor in given.items():
            mine = own.get(name)
            if mine is None:
                raise UserError(
                    _FIELD, name, "the engine has no such parameter that is trained", _FIX
                )
            if isinstance(mine, str):
                why = "the engine exposes only a digest of it, so it cannot be written"
                raise UserError(_FIELD, name, why, "use an engine that exposes its parameters")
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                why = f"it is {_form(mine)} in the engine and came as {_form(tensor)}"
                raise UserError(_FIELD, name, why, _FIX)
            mine.copy_(tensor)


def writable_weights(engine: RolloutEngine) -> Mapping[str, Tensor | str]:
    """The parameters that new weights of an engine are written into; a UserError without any."""
    if isinstance(engine, RemoteEngine):
        return engine.weights()
    fingerprint = engine.fingerprint()
    if fingerprint is None:
        why = "the engine cannot say which weights it holds, so none can be given to it"
        fix = "let its `fingerprint` return the policy's parameters"
        raise UserError(_FIELD, type(engine).__name__, why, fix)
    return fingerprint.weights


def free_memory(engine: RolloutEngine) -> None:
    """Free what an engine holds besides weights until its next request; a server goes on."""
    for one in engine.engines if isinstance(engine, VersionedEngines) else (engine,):
        if isinstance(one, RemoteEngine):
            one.rest()
        else:
            one.close()


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@runtime_checkable
class LoadsWeights(Protocol):
    """An engine that writes whole parameters into its policy by itself."""

    def load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Write them."""
        ...


def load_weights(engine: RolloutEngine, given: Mapping[str, Tensor]) -> None:
    """Write parameters into the policy of an engine; `finish_weights` follows the last of them."""
    drop_prefixes(engine)
    if isinstance(engine, LoadsWeights):
        engine.load_weights(given)
    else:
        copy_into(writable_weights(engine), given)


def finish_weights(engine: RolloutEngine, version: int) -> None:
    """Send the policy's weights to the server of an engine, if it has one, as this version."""
    if isinstance(engine, RemoteEngine):
        engine.send_weights(version)


def load_part(
    engines: VersionedEngines,
    version: int | None,
    keep: Collection[int | None],
    part: PackedWeights | MappedWeights,
    is_last: bool,
) -> tuple[set[str], dict[str, str] | None]:
    """Load a part; the names of its parameters, and after the last part the engine's digests."""
    engine = engines.engine() if version is None else engines.hold(version, keep=keep)
    with readable(part) as given:
        load_weights(engine, given)
        names = set(given)
    if is_last:
        finish_weights(engine, version or 0)
    return names, digests_of(engine) if is_last else None


def version_digests(engines: VersionedEngines, version: int | None) -> dict[str, str] | None:
    """Digests of a version's weights; None: they were dropped, or the engine has no digests."""
    is_gone = version is not None and version not in engines.versions
    return None if is_gone else digests_of(engines.engine(version))


def digests_of(engine: RolloutEngine) -> dict[str, str] | None:
    """Digests of the weights that an engine samples with; None: it has none."""
    fingerprint: Fingerprint | None = engine.fingerprint()
    return None if fingerprint is None else _described(fingerprint)


def _described(fingerprint: Fingerprint) -> dict[str, str]:
    here = tensor_digests({n: w for n, w in fingerprint.weights.items() if not isinstance(w, str)})
    return {n: w if isinstance(w, str) else here[n] for n, w in fingerprint.weights.items()}
