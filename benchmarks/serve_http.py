"""Tokens per second of OpenAI-compatible servers over HTTP, by so many clients at once.

Every server answers the same requests, prompts of token ids and answers of given lengths, each
client sending its next request when the last one was answered. Servers run one after the other,
`--rounds` times in turn; figures are for the whole run, from the first request to the last answer.

    python benchmarks/serve_http.py --model ~/.cache/luyen/models/smollm2-135m --concurrent 32 \
        --requests 96 --servers luyen vllm llama --vllm-python VLLM/bin/python \
        --llama-python LLAMA/bin/python --gguf FILE  # `llama_server.py --convert` makes the file

llama.cpp was seen to generate about 5 tokens a second with SmolLM2 135M in bfloat16 on one shared
core, so that the default number of requests takes most of an hour: begin with `--requests 6`.

On a GPU, with random weights in a known shape, compared with the bytes that decoding must move:

    python benchmarks/serve_http.py --shape qwen2.5-1.5b --device cuda --concurrent 256 \
        --requests 1024 --prompt-tokens 100 1024 --new-tokens 100 1024
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luyen.base.seeds import derive_key, uniform


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    prompt: tuple[int, ...]
    new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a server did with all requests."""

    seconds: float
    tokens: int
    latencies: tuple[float, ...]


def calls(args: argparse.Namespace, vocabulary: int) -> list[Call]:
    """Requests of random lengths, the same ones for every server."""
    found: list[Call] = []
    for number in range(args.requests):
        key = derive_key(args.seed, "serve_http", number)
        size, new = (
            low + int(uniform(key, i) * (high - low + 1))
            for i, (low, high) in enumerate((args.prompt_tokens, args.new_tokens))
        )
        prompt = tuple(100 + int(uniform(key, 2 + i) * (vocabulary - 200)) for i in range(size))
        found.append(Call(prompt, new, number))
    return found


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a reply on a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    names = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if b": " in line)
    if b"content-length" in names:
        return status, await reader.readexactly(int(names[b"content-length"]))
    body = bytearray()
    while size := int((await reader.readline()).strip(), 16):  # chunks
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, bytes(body)


async def client(port: int, name: str, waiting: list[Call], found: list[tuple[int, float]]) -> None:
    """Send the next call as soon as the last one was answered, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    while waiting:
        call = waiting.pop()
        body: dict[str, Any] = {
            "model": name,
            "prompt": list(call.prompt),
            "max_tokens": call.new_tokens,
            "temperature": 1.0,
            "seed": call.seed,
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        start = time.perf_counter()
        writer.write(head.encode() + data)
        status, reply = await read_reply(reader)
        assert status == 200, (status, reply[:500])
        count = json.loads(reply)["usage"]["completion_tokens"]
        assert count == call.new_tokens, (count, call.new_tokens)
        found.append((count, time.perf_counter() - start))
    writer.close()


def load(port: int, name: str, work: list[Call], concurrent: int) -> Result:
    """All requests, from as many clients as run at once."""
    waiting, found = list(reversed(work)), list[tuple[int, float]]()

    async def run() -> None:
        await asyncio.gather(*(client(port, name, waiting, found) for _ in range(concurrent)))

    start = time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - start
    return Result(seconds, sum(count for count, _ in found), tuple(wait for _, wait in found))


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def command(side: str, model: str, port: int, args: argparse.Namespace) -> list[str]:
    """What starts a server."""
    longest = str(args.prompt_tokens[1] + args.new_tokens[1])
    rows = str(args.concurrent)
    if side == "luyen":
        words = [sys.executable, "-m", "luyen", "serve", model, "--port", str(port)]
        words += ["--dtype", args.dtype, "--device", args.device, "--max-num-seqs", rows]
        return [*words, "--max-model-len", longest, *shlex.split(args.luyen_options)]
    if side == "vllm":
        words = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        words += ["--port", str(port), "--dtype", args.dtype, "--max-num-seqs", rows]
        return [*words, "--max-model-len", longest, *shlex.split(args.vllm_options)]
    words = [args.llama_python, str(Path(__file__).with_name("llama_server.py"))]
    return [
        *words,
        "--model",
        args.gguf,
        "--port",
        str(port),
        "--slots",
        rows,
        "--longest",
        longest,
    ]


@contextmanager
def server(side: str, model: str, args: argparse.Namespace) -> Iterator[int]:
    """A server that answers; its port."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "VLLM_NO_USAGE_STATS": "1"}
    with open(f"{tempfile.gettempdir()}/serve-{side}.log", "w") as log:
        process = subprocess.Popen(
            command(side, model, port, args), stdout=log, stderr=log, env=env
        )
        try:
            end = time.monotonic() + 300
            while True:
                assert process.poll() is None, f"{side} ended: see {log.name}"
                assert time.monotonic() < end, f"{side} does not answer: see {log.name}"
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                except OSError:
                    time.sleep(0.5)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def make_folder(shape: str, folder: Path, device: str) -> int:
    """A model folder with random weights in a known shape, and a tokenizer of its size."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from luyen.models.random_policy import shaped_policy

    policy = shaped_policy(shape, dtype=torch.bfloat16, device=device)
    net: Any = policy.model
    size = net.config.vocab_size
    net.save_pretrained(folder)
    # One row is left for the special token that the fast tokenizer adds.
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size - 1)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1").save_pretrained(folder)
    return size


def floor_seconds(shape: str, work: list[Call], concurrent: int, device: str) -> float:
    """Time that decoding takes if it moves only what it must, with every row always in use."""
    import torch

    from luyen.models.random_policy import shaped_policy
    from luyen.studio.bench import ModelSizes, measure_ceilings

    sizes = ModelSizes.of(shaped_policy(shape, dtype=torch.bfloat16, device=device))
    rate = measure_ceilings(device, torch.bfloat16).bytes_per_second
    generated = sum(call.new_tokens - 1 for call in work)
    contexts = sum(
        (call.new_tokens - 1) * len(call.prompt) + call.new_tokens * (call.new_tokens - 1) // 2
        for call in work
    )
    return sizes.decode_bytes(-(-generated // concurrent), generated, contexts) / rate


def measure(model: str, work: list[Call], args: argparse.Namespace) -> dict[str, list[Result]]:
    """Results of every server, which take turns."""
    found: dict[str, list[Result]] = {side: [] for side in args.servers}
    for _ in range(args.rounds):
        for side in args.servers:
            with server(side, model, args) as port:
                name = "llama" if side == "llama" else model
                # What the first answers compile or allocate is not counted.
                load(port, name, work[: args.concurrent], args.concurrent)
                result = load(port, name, work, args.concurrent)
            found[side].append(result)
            waits = statistics.quantiles(result.latencies, n=20)
            print(
                f"{side}: {result.tokens / result.seconds:.1f} tokens/s, {result.seconds:.1f} s,"
                f" a request {waits[9]:.2f} s (95 % within {waits[18]:.2f} s)",
                flush=True,
            )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="model folder")
    parser.add_argument("--shape", help="random weights in this shape instead of a model")
    parser.add_argument("--gguf", help="the model for llama.cpp, in the same type")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-options", default="--enforce-eager --no-enable-prefix-caching")
    parser.add_argument("--luyen-options", default="")
    parser.add_argument("--servers", nargs="+", default=["luyen"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 256))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 128))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            vocabulary, model = make_folder(args.shape, Path(folder), args.device), folder
        else:
            model = str(Path(args.model).expanduser())
            vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        work = calls(args, vocabulary)
        found = measure(model, work, args)
    if args.shape:
        floor = floor_seconds(args.shape, work, args.concurrent, args.device)
        for side, results in found.items():
            best = statistics.median(result.seconds for result in results)
            print(f"{side}: {floor / best:.1%} of the floor ({floor:.2f} s of {best:.2f} s)")


if __name__ == "__main__":
    main()
