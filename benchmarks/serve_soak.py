"""Many clients for minutes against `luyen serve`: no error, flat memory, answers as made alone.

Every request of a fixed set (chats and completions, whole and streamed, greedy and sampled, with
several answers, log-probabilities, a JSON schema, echoed prompts) is first sent alone. Then so many
clients send them in an order of their own, each its next one when the last was answered, and each
answer is compared with the one made alone, character by character and number by number. Some
clients go away in the middle of an answer. The memory of the server is read every second; its slope
is a line of least squares over the second half of the time.

    python benchmarks/serve_soak.py --clients 64 --seconds 300
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOLATILE = ("id", "created")
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    right: int = 0
    left_early: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)


def calls(count: int) -> list[Call]:
    """Requests of all kinds, the same ones in every run."""
    found: list[Call] = []
    for number in range(count):
        ask = f"{10 + number * 7 % 90}+{10 + number * 13 % 90}="
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": ask}], "max_tokens": 24}
        kinds: list[Call] = [
            Call("/v1/chat/completions", {**chat, "temperature": 0}),
            Call("/v1/chat/completions", {**chat, "seed": number, "stream": True}),
            Call("/v1/chat/completions", {**chat, "seed": number, "n": 4, "top_p": 0.9}),
            Call(
                "/v1/chat/completions",
                {**chat, "seed": number, "logprobs": True, "top_logprobs": 3},
            ),
            Call("/v1/completions", {"prompt": ask, "max_tokens": 48, "seed": number}),
            Call(
                "/v1/completions",
                {"prompt": [ask, ask[::-1]], "max_tokens": 8, "echo": True, "logprobs": 2},
            ),
            Call("/v1/completions", {"prompt": ask, "seed": 1, "ignore_eos": True, "stream": True}),
        ]
        form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
        kinds.append(Call("/v1/chat/completions", {**chat, "seed": 1, "response_format": form}))
        kind = kinds[number % len(kinds)]
        found.append(Call(kind.path, {**kind.body, "seed": kind.body.get("seed", number)}))
    return found


async def send(port: int, call: Call, *, leaves_after_s: float | None = None) -> Any:
    """The reply without what differs by nature; None for a client that left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        data = json.dumps(call.body).encode()
        head = (
            f"POST {call.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        if leaves_after_s is not None:
            await asyncio.sleep(leaves_after_s)
            return None
        raw = await asyncio.wait_for(reader.read(-1), 120)
    finally:
        writer.transport.abort()
    first, _, rest = raw.partition(b"\r\n\r\n")
    status = int(first.split(b" ", 2)[1])
    assert status == 200, f"status {status}: {rest[:200]!r}"
    if call.body.get("stream"):
        return _joined(rest)
    reply = json.loads(rest)
    return {name: value for name, value in reply.items() if name not in VOLATILE}


def _joined(body: bytes) -> Any:
    """The text of a stream, whatever pieces it came in; a stream that did not end is an error."""
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    assert events[-1:] == [b"[DONE]"], f"a stream ended by {events[-1:]!r}"
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            piece = choice.get("text", choice.get("delta", {}).get("content")) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice.get("finish_reason"):
                ends[choice["index"]] = choice["finish_reason"]
    return {"texts": texts, "ends": ends}


async def client(
    port: int, number: int, work: list[Call], alone: list[Any], end: float, tally: Tally
) -> None:
    """Requests in an order of its own until the time is over."""
    order = random.Random(number)
    while time.monotonic() < end:
        chosen = order.randrange(len(work))
        leaves = order.uniform(0.0, 0.05) if order.random() < 0.02 else None
        start = time.perf_counter()
        try:
            got = await send(port, work[chosen], leaves_after_s=leaves)
        except (AssertionError, OSError, ValueError, TimeoutError) as error:
            tally.errors[f"{type(error).__name__}: {str(error)[:160]}"] += 1
            continue
        if leaves is not None:
            tally.left_early += 1
        elif got == alone[chosen]:
            tally.right += 1
            tally.latencies.append(time.perf_counter() - start)
        else:
            tally.errors["another answer than alone"] += 1


def resident_mb(pid: int) -> float:
    """Memory of a process and its children that is in use."""
    found = 0.0
    for one in [pid, *_children(pid)]:
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found += int(line.split()[1]) / 1024
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


async def watch(pid: int, end: float, seen: list[tuple[float, float]]) -> None:
    """Memory once a second."""
    while time.monotonic() < end:
        seen.append((time.monotonic(), resident_mb(pid)))
        await asyncio.sleep(1.0)


async def soak(port: int, pid: int, args: argparse.Namespace) -> tuple[Tally, list[Any]]:
    """All clients at once; before that every request alone."""
    work = calls(args.calls)
    alone = [await send(port, call) for call in work]
    tally, seen = Tally(), list[tuple[float, float]]()
    end = time.monotonic() + args.seconds
    clients = [client(port, i, work, alone, end, tally) for i in range(args.clients)]
    await asyncio.gather(watch(pid, end, seen), *clients)
    return tally, seen


def report(tally: Tally, seen: list[tuple[float, float]], seconds: float) -> bool:
    """Print the figures; whether every answer was right."""
    waits = statistics.quantiles(tally.latencies, n=20)
    print(
        f"{tally.right} answers as made alone ({tally.right / seconds:.1f} a second), median"
        f" {waits[9]:.2f} s, 95 % within {waits[18]:.2f} s; {tally.left_early} clients left early"
    )
    print(f"{sum(tally.errors.values())} errors")
    for said, count in tally.errors.most_common(10):
        print(f"  {count} x {said}")
    half = seen[len(seen) // 2 :]
    slope = statistics.linear_regression([at for at, _ in half], [mb for _, mb in half]).slope
    print(
        f"memory: {seen[0][1]:.1f} MB at first, {half[0][1]:.1f} in the middle,"
        f" {seen[-1][1]:.1f} at the end; {slope * 60:+.3f} MB a minute in the second half"
    )
    return not tally.errors


def main() -> None:
    """Start a server, or use one that runs, and let the clients loose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="builtin://arithmetic")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--calls", type=int, default=160, help="different requests")
    args = parser.parse_args()
    command = [sys.executable, "-m", "luyen", "serve", args.model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].strip()
            port = int(address.rpartition(":")[2].partition("/")[0])
            tally, seen = asyncio.run(soak(port, server.pid, args))
        finally:
            server.terminate()
    sys.exit(0 if report(tally, seen, args.seconds) and server.returncode == 0 else 1)


if __name__ == "__main__":
    main()
