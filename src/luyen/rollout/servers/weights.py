"""How weights reach a server, and how it proves that it has them.

A transport sends the tensors of a whole checkpoint, under the names of Hugging Face's layout: in
files of a folder, over a process group with the server's workers, or as memory of a GPU that both
processes use.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.base.files import writing
from luyen.base.seeds import derive_key, mix
from luyen.models.export import write_tensors
from luyen.models.policy import Policy
from luyen.models.weights import tensor_digests
from luyen.rollout.protocol import Completion, Request, Sampling, completion_fault
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import (
    Generated,
    HttpCall,
    ServerDialect,
    ServerFault,
    TensorForm,
    WeightGroup,
    read_reply,
)
from luyen.rollout.servers.process import Server, free_port
from luyen.rollout.servers.vllm_worker import (
    broadcast,
    export_handle,
    make_communicator,
    make_group,
)

_FIELD = "actor_rollout_ref.rollout.server.transport"
TRANSFER = {"backend": "nccl"}
"""Configuration of vLLM's weight transfer."""
_LOAD_S = 1800.0
"""Most seconds for loading weights."""


class WeightTransport(Protocol):
    """Sends weights to one server."""

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str | None:
        """Send tensors as this version; returns when the server has loaded them.

        The name of the model that has them now; None: the one it was before. A ServerFault if it
        could not; sending again, also to a restarted server, is allowed.
        """
        ...

    def reset(self) -> None:
        """Drop connections to the former server: it was restarted."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...


@final
class FolderTransport:
    """A safetensors file in a folder that the server can read."""

    def __init__(
        self, connection: ServerConnection, dialect: ServerDialect, *, model: Path, folder: Path
    ) -> None:
        """`model` has config and tokenizer, if the server was started here.

        Versions are written below `folder`.
        """
        self._connection = connection
        self._dialect = dialect
        self._model = model
        self._folder = folder
        if not dialect.load_folder(folder, 0):
            why = f"`{dialect.name}` does not load weights from a folder"
            raise UserError(_FIELD, "folder", why, "choose another transport")

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors and let the server load them."""
        folder, text = self._folder / f"version-{version}", hash_value(tensor_digests(tensors))
        complete = folder / "complete"
        if not complete.is_file() or complete.read_text() != text:
            with writing(folder):
                self._write(folder, tensors)
                complete.write_text(text)
        for call in self._dialect.load_folder(folder.absolute(), version):
            self._connection.call(call)
        self._drop_old(folder)

    def reset(self) -> None:
        """The files stay."""

    def close(self) -> None:
        """Remove every version."""
        for folder in self._versions():
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in self._model.iterdir() if self._model.is_dir() else ():
            if file.is_file() and not file.name.endswith((".safetensors", ".index.json")):
                shutil.copyfile(file, folder / file.name)
        plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        write_tensors(plain, folder / "model.safetensors")

    def _drop_old(self, newest: Path) -> None:
        for folder in self._versions():
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def _versions(self) -> list[Path]:
        return sorted(self._folder.glob("version-*"))


@final
class GroupTransport:
    """Broadcasts of a process group: gloo between CPUs, NCCL between GPUs.

    The group is made of a store and a backend alone, so that it can coexist with any other group of
    this process.
    """

    def __init__(
        self,
        connection: ServerConnection,
        dialect: ServerDialect,
        *,
        workers: int,
        backend: Literal["gloo", "nccl"],
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
        device: torch.device | None = None,
    ) -> None:
        """`workers` are the processes of the server that hold weights."""
        self._connection = connection
        self._dialect = dialect
        self._size = workers + 1
        self._backend: Literal["gloo", "nccl"] = backend
        self._address = address
        self._timeout_s = timeout_s
        self._device = device or torch.device("cpu")
        self._group: Any = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast the tensors one after the other."""
        forms = [
            TensorForm(name=n, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape))
            for n, t in tensors.items()
        ]
        group, self._group = self._group or self._join(), None
        reply = self._connection.start(self._dialect.receive(forms, version))
        try:
            for tensor in tensors.values():
                broadcast(group, tensor.detach().to(self._device).contiguous())
        except RuntimeError as error:  # what torch raises when a rank is gone
            reply.cancel()
            raise ServerFault("connection", f"the weight group broke: {error}") from error
        reply.result()
        self._group = group

    def reset(self) -> None:
        """Leave the group: its workers are gone."""
        self._group = None

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    def _join(self) -> Any:
        group = WeightGroup(
            address=self._address,
            port=free_port(),
            size=self._size,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        call = self._dialect.join_group(group)
        if call is None:
            why = f"`{self._dialect.name}` cannot join a process group here"
            raise UserError(_FIELD, "group", why, "set it to folder")
        reply = self._connection.start(call)
        try:
            made = make_group(
                group.address,
                group.port,
                0,
                group.size,
                group.backend,
                group.timeout_s,
                self._dialect.group_prefixes(group.backend),
            )
        except RuntimeError as error:
            reply.cancel()
            raise ServerFault("connection", f"the weight group was not made: {error}") from error
        reply.result()
        return made


@final
class IpcTransport:
    """CUDA IPC: the server maps tensors of the trainer on the same GPU, and copies them."""

    def __init__(
        self, connection: ServerConnection, dialect: ServerDialect, *, device: torch.device
    ) -> None:
        self._connection = connection
        self._dialect = dialect
        self._device = device
        if device.type != "cuda" or dialect.map_tensors((), 0) is None:
            why = f"`{dialect.name}` on {device.type} cannot map the trainer's tensors"
            raise UserError(_FIELD, "ipc", why, "set it to folder")

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Send handles of the tensors; the server reads them before it replies."""
        kept = {n: t.detach().to(self._device).contiguous() for n, t in tensors.items()}
        torch.cuda.synchronize(self._device)
        call = self._dialect.map_tensors([[n, export_handle(t)] for n, t in kept.items()], version)
        assert call is not None, "the constructor refuses a server that cannot map"
        self._connection.call(call)
        torch.cuda.ipc_collect()

    def reset(self) -> None:
        """There is no connection to drop."""

    def close(self) -> None:
        """There is nothing to release."""


@final
class TransferTransport:
    """vLLM's own weight transfer: NCCL broadcasts to workers that know nothing of Luyen.

    The server must have been started with `TRANSFER` as its `--weight-transfer-config`. Both sides
    make the communicator with vLLM's classes, so vLLM must be installed in the trainer's
    environment too.
    """

    def __init__(
        self,
        connection: ServerConnection,
        *,
        workers: int,
        device: torch.device,
        address: str,
        note_version: Callable[[int], HttpCall] | None,
    ) -> None:
        """`workers` are the processes of the server that hold weights.

        `note_version` tells a server which version it has, where ending a session does not.
        """
        self._connection = connection
        self._size = workers + 1
        self._device = device
        self._address = address
        self._note_version = note_version
        self._communicator: Any = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors as this version; returns when the server has loaded them."""
        kept = {n: t.detach().to(self._device).contiguous() for n, t in tensors.items()}
        update = {
            "names": list(kept),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in kept.values()],
            "shapes": [list(t.shape) for t in kept.values()],
        }
        communicator, self._communicator = self._communicator or self._join(), None
        self._connection.call(HttpCall(path="/start_weight_update", body={}))
        body = {"update_info": update}
        reply = self._connection.start(
            HttpCall(path="/update_weights", body=body, timeout_s=_LOAD_S)
        )
        # A stream of its own, and not used again after a fault: if the workers fail, its
        # broadcasts never end.
        stream, self._stream = self._stream or torch.cuda.Stream(self._device), None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in kept.values():
            communicator.broadcast(tensor, src=0, stream=stream)
        reply.result()
        stream.synchronize()
        finish = {"weight_version": str(version)}
        self._connection.call(HttpCall(path="/finish_weight_update", body=finish))
        if self._note_version is not None:
            self._connection.call(self._note_version(version))
        self._communicator, self._stream = communicator, stream

    def reset(self) -> None:
        """Leave the group: its workers are gone."""
        self._communicator, self._stream = None, None

    def close(self) -> None:
        """Leave the group."""
        self.reset()

    def _join(self) -> Any:
        port = free_port()
        init = {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
        }
        call = HttpCall(path="/init_weight_transfer_engine", body={"init_info": init})
        reply = self._connection.start(call)
        try:
            made = make_communicator(self._address, port, self._size, self._device)
        except RuntimeError as error:
            reply.cancel()
            raise ServerFault("connection", f"the weight group was not made: {error}") from error
        reply.result()
        return made


# What a server holds after a publication: digests of its tensors, and a probe of its answers.
#
# The probe is a short sample at a temperature other than 1. Its log-probabilities under the
# trainer's weights say whether the server computes with these weights, and with which convention
# it reports.

_ENGINE = "actor_rollout_ref.rollout.name"
TEMPERATURE = 0.5
"""Of the probe: its square and 1 give other log-probabilities, which name a wrong convention."""
PROMPT_LENGTH, NEW_TOKENS = 12, 12
_TOLERANCE = {torch.float32: 1e-4}
"""Mean difference that arithmetic may make; seen with vLLM in fp32: 1e-6 to 1e-5."""
_ROUGH = 0.1
"""The same in 16 bits."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt whose continuation is scored by server and trainer.

    Example:
        >>> probe = Probe.of(vocabulary=100, room=64)
        >>> len(probe.tokens), probe == Probe.of(vocabulary=100, room=64)
        (12, True)
    """

    tokens: tuple[int, ...]
    """The prompt: tokens of the vocabulary at random, the same in every run."""
    sampling: Sampling
    """How it is continued."""
    seed: int
    """Its random seed."""

    @classmethod
    def of(cls, *, vocabulary: int, room: int) -> "Probe":
        """The probe of a vocabulary that fits into `room` tokens."""
        key = derive_key(0, "probe", vocabulary)
        prompt = max(1, min(PROMPT_LENGTH, room // 2))
        new = max(1, min(NEW_TOKENS, room - prompt))
        return cls(
            tokens=tuple(mix(key, i) % vocabulary for i in range(prompt)),
            sampling=Sampling(max_new_tokens=new, temperature=TEMPERATURE, ignore_stop=True),
            seed=key >> 2,
        )

    def fault(self, made: Generated, *, vocabulary: int) -> str | None:
        """Why a reply cannot be compared with the trainer's; None: it can."""
        new, name = self.sampling.max_new_tokens, "probe"
        if len(made.tokens) != new:
            return f"{len(made.tokens)} tokens came, and {new} were wanted"
        logps = tuple(float("nan") if logp is None else logp for logp in made.logps)
        request = Request(id=name, tokens=self.tokens, keys=(0,), sampling=self.sampling)
        completion = Completion(
            request=name, sample=0, tokens=made.tokens, logps=logps, reason=made.reason
        )
        return completion_fault(completion, request, vocabulary=vocabulary)


@torch.no_grad()
def trainer_logps(
    policy: Policy, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float
) -> Tensor:
    """The trainer's log-probabilities of a continuation, in fp32 on the host."""
    whole = torch.tensor(prompt + tokens, device=policy.device)
    mask = torch.arange(len(whole), device=policy.device) >= len(prompt)
    return policy(whole, [len(whole)], mask, temperature=temperature).logp.float().cpu()


def refuse_other_answers(
    policy: Policy, probe: Probe, tokens: tuple[int, ...], logps: tuple[float, ...], *, who: str
) -> float:
    """Mean difference of the probe.

    A UserError for a wrong convention, a ServerFault for other weights.
    """
    found = torch.tensor(logps)

    def difference(temperature: float) -> float:
        ours = trainer_logps(policy, probe.tokens, tokens, temperature)
        return float((ours - found).abs().mean())

    most = _TOLERANCE.get(next(policy.parameters()).dtype, _ROUGH)
    gap = difference(TEMPERATURE)
    if gap <= most:
        return gap
    why = f"the log-probabilities of a probe differ by {gap:.3g} from the trainer's (most: {most})"
    if difference(1.0) <= most:
        why += ": it reports them before the temperature is applied"
        fix = "vllm: start it with --logprobs-mode processed_logprobs; sglang: start it without "
        raise UserError(_ENGINE, who, why, f"{fix}SGLANG_RETURN_ORIGINAL_LOGPROB")
    if difference(TEMPERATURE**2) <= most:
        why += ": it applies the temperature twice"
        raise UserError(_ENGINE, who, why, "drop the temperature from the server's own settings")
    raise ServerFault("weights", f"{why}: it computes with other weights")


def refuse_other_tensors(found: Mapping[str, str], sent: Mapping[str, str]) -> None:
    """A ServerFault that names the first tensor that the server does not hold as it was sent."""
    for name, digest in sent.items():
        if found.get(name) != digest:
            why = f"{name} is {found.get(name, 'missing')} there and was sent as {digest}"
            raise ServerFault("weights", why)


# The proof is repeated before tokens are taken: what changed the weights in between is noticed.

_PAUSE_S = 1.0
_SHARE = 10.0
"""Between two proofs of one generation: at least so many seconds, and so often what one took."""


@final
class WeightProof:
    """Asks one server to prove that it computes with the policy's weights."""

    def __init__(
        self,
        server: Server,
        connection: ServerConnection,
        dialect: ServerDialect,
        *,
        policy: Policy,
        room: int,
    ) -> None:
        """`room`: most tokens of a sequence."""
        self._server, self._connection, self._dialect = server, connection, dialect
        self._policy, self._room = policy, room
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether so much time has passed that another proof costs little of it."""
        return time.monotonic() >= self._next

    def require(self, *, model: str | None, version: int) -> None:
        """A ServerFault unless the server answers a probe as the policy does, at this version."""
        began = time.monotonic()
        self._refuse_impostor()
        vocabulary = self._policy.head.vocabulary
        probe = Probe.of(vocabulary=vocabulary, room=self._room)
        call = self._dialect.generate(
            "luyen-probe", probe.tokens, probe.sampling, seed=probe.seed, model=model
        )
        made = read_reply(self._dialect.generated, self._connection.call(call))
        why = probe.fault(made, vocabulary=vocabulary)
        if why is not None:
            raise ServerFault("reply", f"the probe: {why}")
        logps = tuple(logp for logp in made.logps if logp is not None)
        refuse_other_answers(self._policy, probe, made.tokens, logps, who=self._server.url)
        asks = self._dialect.weight_version()
        if asks is not None:
            found = read_reply(self._dialect.read_weight_version, self._connection.call(asks))
            refuse_other_version(found, version)
        self._refuse_impostor()
        ended = time.monotonic()
        self._next = ended + max(_PAUSE_S, _SHARE * (ended - began))

    def _refuse_impostor(self) -> None:
        if not self._server.is_listening():
            raise ServerFault("connection", f"another process listens at {self._server.url}")


def refuse_other_version(found: str, wanted: int) -> None:
    """A ServerFault if a server says that it has another version than the one it was sent.

    Example:
        >>> refuse_other_version("3", 3)
    """
    if found != str(wanted):
        raise ServerFault("weights", f"the server has version {found}, not {wanted}")
