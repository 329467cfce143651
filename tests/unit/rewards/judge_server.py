"""A real HTTP server on this machine that answers like a judge, well or badly, as its path says."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: Any, reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()


class Judging(BaseHTTPRequestHandler):
    """Answers by the first word of the path."""

    protocol_version = "HTTP/1.1"
    server: "JudgeServer"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        way = self.path.split("/")[1]
        with self.server.lock:
            self.server.asked.append((time.monotonic(), self.path, dict(self.headers), body))
            turn = sum(path == self.path for _, path, _, _ in self.server.asked)
        try:
            getattr(self, f"way_{way}")(turn, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def say(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def way_good(self, turn: int, body: Any) -> None:
        """The score is how often the answer says `good`."""
        self.say(completion(f"Score: {body['messages'][-1]['content'].count('good')}"))

    def way_chunked(self, turn: int, body: Any) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = completion("Score: 7")
        for part in (data[:5], data[5:], b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    def way_unmeasured(self, turn: int, body: Any) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + completion("Score: 7"))

    def way_hang(self, turn: int, body: Any) -> None:
        self.server.ended.wait(20)

    def way_drip(self, turn: int, body: Any) -> None:
        """A header, then a byte now and then: every read succeeds, and there is no end."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
        while not self.server.ended.wait(0.05):
            self.wfile.write(b" ")

    def way_hangup(self, turn: int, body: Any) -> None:
        self.close_connection = True

    def way_halfway(self, turn: int, body: Any) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{")

    def way_noise(self, turn: int, body: Any) -> None:
        self.close_connection = True
        self.wfile.write(b"\x00\xff" * 100 + b"\r\n\r\n")

    def way_page(self, turn: int, body: Any) -> None:
        self.say(b"<html><body>Please log in: 10 of 10</body></html>", Content_Type="text/html")

    def way_half(self, turn: int, body: Any) -> None:
        self.say(completion("Score: 7")[:-5])

    def way_shape(self, turn: int, body: Any) -> None:
        self.say(b'{"score": 10}')

    def way_parts(self, turn: int, body: Any) -> None:
        self.say(completion([{"type": "text", "text": "Score: 7"}]))

    def way_empty(self, turn: int, body: Any) -> None:
        self.say(completion(""))

    def way_null(self, turn: int, body: Any) -> None:
        self.say(completion(None))

    def way_cut(self, turn: int, body: Any) -> None:
        self.say(completion("", "length"))

    def way_nonsense(self, turn: int, body: Any) -> None:
        self.say(completion("The weather is fine."))

    def way_nan(self, turn: int, body: Any) -> None:
        self.say(completion("Score: NaN"))

    def way_infinite(self, turn: int, body: Any) -> None:
        self.say(completion("Score: 1e999"))

    def way_beyond(self, turn: int, body: Any) -> None:
        self.say(completion("Score: 11"))

    def way_huge(self, turn: int, body: Any) -> None:
        self.say(completion("Score: 7 " * 10**6))

    def way_endless(self, turn: int, body: Any) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not self.server.ended.is_set():
            self.wfile.write(b"x" * 2**16)

    def way_refused(self, turn: int, body: Any) -> None:
        self.say(b'{"error": {"message": "no such key"}}', 401)

    def way_broken(self, turn: int, body: Any) -> None:
        self.say(b"<h1>Internal Server Error</h1>", 500)

    def way_busy(self, turn: int, body: Any) -> None:
        self.say(b'{"error": "slow down"}', 429, Retry_After="0")

    def way_moved(self, turn: int, body: Any) -> None:
        self.say(b"", 302, Location="http://127.0.0.1:1/")

    def way_later(self, turn: int, body: Any) -> None:
        """Twice busy, then good."""
        self.way_busy(turn, body) if turn < 3 else self.say(completion("Score: 7"))

    def way_patient(self, turn: int, body: Any) -> None:
        if turn == 1:
            return self.say(b"", 503, Retry_After="1")
        return self.say(completion("Score: 7"))

    def way_fickle(self, turn: int, body: Any) -> None:
        self.say(completion("Hm." if turn == 1 else "Score: 7"))

    def log_message(self, format: str, *args: Any) -> None:
        """Quietly."""


class JudgeServer(ThreadingHTTPServer):
    """Every request it was sent, with its time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Judging)
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.asked: list[tuple[float, str, dict[str, str], Any]] = []

    def url(self, way: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{way}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what is tested."""


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
