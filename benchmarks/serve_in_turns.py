"""Tokens per second of servers that are all busy, each of them running for a moment in turn.

Tokens are also counted per processor second, that of all processes of a server: a busy machine
lengthens these much less than those of the clock.

Every server holds `--concurrent` requests all the time; all but one are stopped (SIGSTOP), and the
running one's tokens are counted as they are streamed. So what else the machine does meets all sides
alike, no side pays for a start or a last request, and all of it ends after `--start-s` and
`--minutes` at the latest.
Prompts are token ids, lengths are the same for all sides, and each client sends its next request
when the last one was answered. Requests have no seed: vLLM's CPU build ended at one that had.

    python benchmarks/serve_in_turns.py --model ~/.cache/luyen/models/smollm2-135m \
        --vllm-python VLLM/bin/python --llama-python LLAMA/bin/python --gguf FILE
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_http import Call, calls, command, free_port


@dataclass
class Side:
    """A server, its clients' work, and what was counted."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    waiting: list[Call]
    tokens: int = 0
    """Tokens that were streamed; when an answer ends, as many as the server says it has."""
    answers: int = 0
    rates: list[float] = field(default_factory=list)
    counted: int = 0
    """Tokens of the windows that count."""
    used: float = 0.0
    """Processor seconds of the same windows."""

    def processor_seconds(self) -> float:
        """What the server and its processes have taken so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(words[2]) == self.process.pid:  # process group
                ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def let(self, runs: bool) -> None:
        """Stop the server and its processes, or let them go on."""
        os.killpg(self.process.pid, signal.SIGCONT if runs else signal.SIGSTOP)


def started(name: str, model: str, args: argparse.Namespace) -> Side:
    """A server that is starting; its work is endless."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(f"{tempfile.gettempdir()}/serve-{name}.log", "w") as log:
        words = command(name, model, port, args)
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    return Side(name, port, process, calls(args, vocabulary))


def await_ready(side: Side, end: float) -> None:
    """Return when it answers."""
    while True:
        assert side.process.poll() is None, f"{side.name} ended"
        assert time.monotonic() < end, f"{side.name} does not answer"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{side.port}/health", timeout=5).read()
        except OSError:
            time.sleep(0.5)
        else:
            return


async def events(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Server-sent events of a reply in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0], head + await reader.read(500)
    rest = b""
    while size := int((await reader.readline()).strip(), 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def answer(side: Side, name: str, call: Call) -> None:
    """One request; its tokens are counted as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", side.port, limit=2**24)
    body = {
        "model": name,
        "prompt": list(call.prompt),
        "max_tokens": call.new_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    seen = 0
    async for event in events(reader):
        assert "error" not in event, (side.name, event)
        if event.get("usage"):
            found = event["usage"]["completion_tokens"]
            assert found == call.new_tokens, (side.name, found, call.new_tokens)
            side.tokens += found - seen  # pieces that held several tokens
            seen = found
        elif event["choices"] and event["choices"][0].get("text"):
            side.tokens += 1
            seen += 1
    assert seen == call.new_tokens, (side.name, seen, call.new_tokens)
    side.answers += 1
    writer.close()


async def client(side: Side, name: str) -> None:
    """One request after the other."""
    while True:
        call = side.waiting.pop(0)
        side.waiting.append(call)
        await answer(side, name, call)


async def turns(sides: list[Side], model: str, args: argparse.Namespace) -> None:
    """Windows of all sides in turn; the first ones only fill the servers."""
    end = time.monotonic() + args.minutes * 60
    for side in sides:
        side.let(False)
    names = {side.name: "llama" if side.name == "llama" else model for side in sides}
    clients = [
        asyncio.create_task(client(side, names[side.name]))
        for side in sides
        for _ in range(args.concurrent)
    ]
    round_ = 0
    while round_ < 2 or time.monotonic() + len(sides) * args.window_s < end:
        for side in sides:
            side.let(True)
            before, begin, used = side.tokens, time.perf_counter(), side.processor_seconds()
            await asyncio.sleep(args.window_s if round_ else args.warmup_s)
            side.let(False)
            passed = time.perf_counter() - begin
            await asyncio.sleep(0.1)  # what it had sent is read
            rate, used = (side.tokens - before) / passed, side.processor_seconds() - used
            for task in clients:
                if task.done():
                    task.result()
            if round_:
                side.rates.append(rate)
                side.counted, side.used = side.counted + side.tokens - before, side.used + used
            not_counted = "" if round_ else "not counted: "
            print(f"{not_counted}{side.name} {rate:.1f}, {used:.1f} processor s", flush=True)
        round_ += 1
    for task in clients:
        task.cancel()


def report(sides: list[Side]) -> None:
    """Medians, and how the first side compares in each round."""
    first = sides[0]
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    for side in sides:
        low, high = min(side.rates), max(side.rates)
        pairs = [own / other for own, other in zip(first.rates, side.rates, strict=True) if other]
        ratio = f"; {first.name} is {statistics.median(pairs):.2f} times as fast" if pairs else ""
        print(
            f"{side.name}: median {statistics.median(side.rates):.1f} tokens/s of"
            f" {len(side.rates)} windows ({low:.1f} to {high:.1f}), {side.answers} answers"
            + ("" if side is first else ratio)
            + f"; {side.counted / max(side.used, 0.01):.1f} tokens a processor second"
        )


def main() -> None:
    """Start the servers, let them take turns, print, and end them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--gguf", help="the model for llama.cpp, in the same type")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--vllm-options", default="--enforce-eager --no-enable-prefix-caching")
    parser.add_argument("--luyen-options", default="")
    parser.add_argument("--servers", nargs="+", default=["luyen", "vllm", "llama"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 128))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(32, 64))
    parser.add_argument("--window-s", type=float, default=12.0)
    parser.add_argument("--warmup-s", type=float, default=25.0)
    parser.add_argument("--minutes", type=float, default=5.5, help="of turns")
    parser.add_argument("--start-s", type=float, default=120.0, help="for all servers to start")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.device, args.requests = "cpu", 2048  # more than are answered: no prompt comes twice
    model = str(Path(args.model).expanduser())
    sides = [started(name, model, args) for name in args.servers]
    try:
        end = time.monotonic() + args.start_s
        for side in sides:
            await_ready(side, end)
        asyncio.run(turns(sides, model, args))
        report(sides)
    finally:
        for side in sides:
            os.killpg(side.process.pid, signal.SIGKILL)
            side.process.wait()


if __name__ == "__main__":
    main()
