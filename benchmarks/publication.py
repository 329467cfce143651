"""How long new weights take to reach a vLLM server on the same GPU, by each transport.

Random weights in a known shape. A publication is what `send` waits for: the tensors are there and
loaded. The proof is the comparison of digests of every tensor after it.

    NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 python benchmarks/publication.py --model qwen2.5-1.5b
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from luyen.config.schema.actor_rollout_ref import RolloutConfig, ServerConfig
from luyen.models.export import checkpoint_tensors
from luyen.models.policy import Policy
from luyen.models.random_policy import SHAPES, shaped_policy
from luyen.models.weights import tensor_digests
from luyen.rollout.servers.build import ServerPlace
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.vllm import vllm
from luyen.rollout.servers.weights import refuse_other_tensors


def started(
    policy: Policy, folder: Path, transport: str, options: dict[str, object]
) -> ServerEngine:
    """An engine whose server runs; its answers are not asked for."""
    rollout = RolloutConfig(
        name="vllm",
        gpu_memory_utilization=0.3,
        free_cache_engine=False,
        server=ServerConfig.model_validate({"python": sys.executable, "transport": transport}),
        engine_kwargs={"vllm": options},
    )
    place = ServerPlace(source=str(folder), folder=folder / "server")
    engine = vllm(policy, rollout, longest=512, decode=lambda _: "", place=place)
    assert isinstance(engine, ServerEngine)
    # Two ranks on one GPU claim different hosts.
    os.environ["NCCL_HOSTID"] = "server"
    engine._server.start()
    engine._greet()
    os.environ["NCCL_HOSTID"] = "trainer"
    return engine


def timed(engine: ServerEngine, policy: Policy, version: int) -> tuple[float, float]:
    """Seconds of a publication and of its proof."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)
    torch.cuda.synchronize()
    start = time.perf_counter()
    tensors = checkpoint_tensors(policy)
    engine._control(engine._dialect.pause())
    assert engine._transport is not None
    engine._transport.send(version, tensors)
    sent = time.perf_counter()
    asks = engine._dialect.digests()
    if asks is not None:  # vLLM's own transfer digests nothing
        found = engine._dialect.read_digests(engine._connection.call(asks))
        refuse_other_tensors(found, tensor_digests(tensors))
    engine._control(engine._dialect.resume())
    return sent - start, time.perf_counter() - sent


def main() -> None:
    """Time every transport and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=SHAPES)
    parser.add_argument("--transports", nargs="+", default=["folder", "group", "ipc", "transfer"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--options",
        default='{"enforce_eager": true, "skip_tokenizer_init": true, "load_format": "dummy"}',
        help="options of the server, as JSON",
    )
    args = parser.parse_args()
    policy = shaped_policy(args.model, dtype=torch.bfloat16, device="cuda")
    count = sum(p.numel() for p in policy.parameters())
    print(f"{args.model}: {count / 1e9:.2f}B weights in bf16, {torch.cuda.get_device_name()}")
    for transport in args.transports:
        with tempfile.TemporaryDirectory() as folder:
            engine = started(policy, Path(folder), transport, json.loads(args.options))
            try:
                found = [timed(engine, policy, version) for version in range(args.rounds)]
            finally:
                engine.close()
        first, rest = found[0], found[1:] or found
        sends, proofs = (median(part) for part in zip(*rest, strict=True))
        print(
            f"{transport}: {sends:.3f} s (first {first[0]:.3f} s), proof {proofs:.3f} s", flush=True
        )


if __name__ == "__main__":
    main()
