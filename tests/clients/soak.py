"""Random requests, good and bad, from clients that are polite, rude, slow or gone. At the end nothing must be left over.

    python soak.py --url http://127.0.0.1:8000 --model NAME --key KEY --pid PID --seconds 600

Give the server a K/V cache that is full before half the time is over (`--kv-tokens 16384`): keeping prompts is not a leak, but looks
like one until the cache is full.

Prints how often each kind of request came to each end, and what the server held before and after. Fails when an answer
was not what it had to be, when a request, a page of the K/V cache, a connection or a thread is left over, when memory
grew, or when the server no longer answers.
"""

import argparse
import collections
import http.client
import json
import pathlib
import random
import re
import socket
import struct
import sys
import threading
import time
from urllib.parse import urlsplit

ANSWER_S = 120
"""The longest silence that is taken for patience."""
IDLE_S = 60
"""The longest that a server may take to come to rest."""
GROWTH_MIB = 48
"""Allocators keep what they once had: so much growth over the second half is no leak."""
WORDS = "the quick brown fox jumps over a lazy dog while seven green birds sing to one old moon".split()


class Wrong(Exception):
    """An answer that no request may get."""


class Client:
    """One request at a time, on a connection of its own."""

    def __init__(self, url, key):
        self.where = urlsplit(url)
        self.headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def connect(self, receive_bytes=None):
        connection = http.client.HTTPConnection(self.where.hostname, self.where.port, timeout=ANSWER_S)
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(ANSWER_S)
        sock.connect((self.where.hostname, self.where.port))
        connection.sock = sock
        return connection

    def ask(self, path, body, method="POST", **options):
        connection = self.connect(**options)
        connection.request(method, path, None if body is None else json.dumps(body), self.headers)
        return connection, connection.getresponse()

    def get(self, path):
        connection, answer = self.ask(path, None, "GET")
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def metrics(self):
        found = re.findall(r"^consort_(\w+?)(?:\{[^}]*\})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        sums = collections.Counter()
        for name, value in found:
            sums[name] += float(value)
        return sums


class Soak:
    def __init__(self, client, model):
        self.client = client
        self.model = model
        listed = json.loads(client.get("/v1/models")[1])["data"]
        context = next(entry["max_model_len"] for entry in listed if entry["id"] == model)
        # A word may be six tokens, and two texts and an answer must fit.
        self.words = context // 32
        self.counts = collections.Counter()
        self.wrong = []
        self.lock = threading.Lock()

    def work(self, seed, until):
        dice = random.Random(seed)
        kinds = [kind for kind, weight in KINDS.items() for _ in range(weight)]
        while time.monotonic() < until and len(self.wrong) < 20:
            kind = dice.choice(kinds)
            try:
                end = kind(self, dice)
            except Wrong as wrong:
                end = "WRONG"
                self.wrong.append(f"{kind.__name__}: {wrong}")
            except (OSError, http.client.HTTPException) as error:
                end = "WRONG"
                self.wrong.append(f"{kind.__name__}: {type(error).__name__} {error}")
            with self.lock:
                self.counts[kind.__name__, end] += 1

    def finish(self, connection, answer, expected=200):
        """Reads an answer whose status must be `expected`, or one that says when to come again."""
        text = answer.read().decode()
        connection.close()
        if busy(answer):
            return None
        if answer.status != expected:
            raise Wrong(f"status {answer.status}, not {expected}: {text[:300]}")
        return text


def busy(answer):
    if answer.status not in (429, 503):
        return False
    if not answer.getheader("retry-after"):
        raise Wrong(f"status {answer.status} without Retry-After")
    return True


def prose(soak, dice):
    return " ".join(dice.choices(WORDS, k=dice.randint(1, soak.words)))


def chat_body(soak, dice, **more):
    # A shared beginning, so that prefixes are found again.
    shared = [WORDS[number % len(WORDS)] for number in range(dice.choice([4, soak.words // 2, soak.words]))]
    system = {"role": "system", "content": " ".join(shared)}
    body = {"model": soak.model, "messages": [system, {"role": "user", "content": prose(soak, dice)}],
            "max_tokens": dice.randint(1, 48), "temperature": dice.choice([0, 1]), "seed": dice.randint(0, 9)}
    return body | more


def whole_chat(soak, dice):
    connection, answer = soak.client.ask("/v1/chat/completions", chat_body(soak, dice, n=dice.choice([1, 1, 3])))
    text = soak.finish(connection, answer)
    if text is None:
        return "busy"
    return json.loads(text)["choices"][0]["finish_reason"]


STREAMS = {
    "/v1/chat/completions": r"^data: \[DONE\]$",
    "/v1/completions": r"^data: \[DONE\]$",
    "/v1/messages": r"^event: message_stop$",
    "/v1/responses": r"^event: response\.(completed|incomplete)$",
}
"""Where answers are streamed, and the line without which they are not whole."""


def stream_body(soak, dice, path, tokens):
    body = {"model": soak.model, "stream": True, "temperature": dice.choice([0, 1])}
    if path == "/v1/completions":
        return body | {"prompt": prose(soak, dice), "max_tokens": tokens}
    if path == "/v1/responses":
        return body | {"input": prose(soak, dice), "max_output_tokens": tokens}
    return body | {"messages": [{"role": "user", "content": prose(soak, dice)}], "max_tokens": tokens}


def whole_stream(soak, dice):
    path = dice.choice(list(STREAMS))
    text = soak.finish(*soak.client.ask(path, stream_body(soak, dice, path, dice.randint(1, 48))))
    if text is None:
        return "busy"
    if not re.search(STREAMS[path], text, re.MULTILINE):
        raise Wrong(f"{path} ended with {text[-200:]!r}")
    return "whole"


def hang_up(soak, dice):
    """Goes away after some bytes: politely, or as a machine that lost its power."""
    path = dice.choice(list(STREAMS))
    connection, answer = soak.client.ask(path, stream_body(soak, dice, path, 400))
    if answer.status != 200:
        return "busy" if soak.finish(connection, answer) is None else "?"
    answer.read(dice.randint(1, 2000))
    if dice.random() < 0.5:
        connection.sock and connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    answer.close()
    connection.close()
    return "gone"


def hang_up_in_prefill(soak, dice):
    body = chat_body(soak, dice, max_tokens=200, stream=True)
    body["messages"][1]["content"] = " ".join(dice.choices(WORDS, k=3 * soak.words))
    connection = soak.client.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), soak.client.headers)
    time.sleep(dice.random() * 0.05)
    connection.close()
    return "gone"


def half_a_body(soak, dice):
    body = json.dumps(chat_body(soak, dice)).encode()
    connection = soak.client.connect()
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (soak.client.headers | {"content-length": str(len(body))}).items():
        connection.putheader(name, value)
    connection.endheaders(body[: dice.randrange(len(body))])
    connection.close()
    return "gone"


def slow_reader(soak, dice):
    """Reads so slowly that buffers between here and the model fill up."""
    path = dice.choice(list(STREAMS))
    connection, answer = soak.client.ask(path, stream_body(soak, dice, path, 60), receive_bytes=2048)
    if answer.status != 200:
        return "busy" if soak.finish(connection, answer) is None else "?"
    for _ in range(dice.randint(5, 20)):
        answer.read(64)
        time.sleep(0.05)
    soak.finish(connection, answer)
    return "whole"


def embeddings(soak, dice):
    text = soak.finish(*soak.client.ask("/v1/embeddings", {"model": soak.model, "input": [prose(soak, dice), prose(soak, dice)]}))
    return "busy" if text is None else f"{len(json.loads(text)['data'])} vectors"


def counted(soak, dice):
    body = {"model": soak.model, "messages": [{"role": "user", "content": prose(soak, dice)}]}
    text = soak.finish(*soak.client.ask("/v1/messages/count_tokens", body))
    return "busy" if text is None else "counted" if json.loads(text)["input_tokens"] > 0 else "?"


def structured(soak, dice):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
              "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    text = soak.finish(*soak.client.ask("/v1/chat/completions", chat_body(soak, dice, max_tokens=60, response_format=format)))
    if text is None:
        return "busy"
    choice = json.loads(text)["choices"][0]
    if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"n"}:
        raise Wrong(choice["message"]["content"])
    return choice["finish_reason"]


def too_long(soak, dice):
    body = chat_body(soak, dice)
    body["messages"][1]["content"] = "again and " * 50_000
    text = soak.finish(*soak.client.ask("/v1/chat/completions", body), expected=400)
    return "busy" if text is None else json.loads(text)["error"]["code"]


def too_large(soak, dice):
    """Says that it will send a terabyte; or sends what it said until it is stopped."""
    connection = soak.client.connect()
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (soak.client.headers | {"content-length": str(1 << 40)}).items():
        connection.putheader(name, value)
    connection.endheaders()
    try:
        for _ in range(dice.choice([0, 4])):
            connection.send(b"x" * 65536)
    except OSError:
        pass  # It has heard enough.
    try:
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        status = 413  # The answer was lost when the connection was reset under what we still sent.
    connection.close()
    if status != 413:
        raise Wrong(f"status {status}, not 413")
    return "refused"


def nonsense(soak, dice):
    path = dice.choice(["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"])
    connection = soak.client.connect()
    body = dice.choice([b"", b"{", b"null", b"[1]", bytes(dice.randrange(256) for _ in range(64)), b'{"model": 7}', b"[" * 10_000])
    connection.request("POST", path, body, soak.client.headers)
    soak.finish(connection, connection.getresponse(), expected=400)
    return "refused"


def not_http(soak, dice):
    connection = soak.client.connect()
    bytes_ = dice.choice([b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"A" * 100_000])
    try:
        connection.sock.sendall(bytes_)
    except OSError:
        pass  # It has heard enough.
    connection.close()
    return "gone"


def watching(soak, dice):
    path = dice.choice(["/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/"])
    status, _ = soak.client.get(path)
    if status != 200:
        raise Wrong(f"{path} gives {status}")
    return "seen"


KINDS = {whole_chat: 6, whole_stream: 8, hang_up: 8, hang_up_in_prefill: 3, half_a_body: 1, slow_reader: 3, embeddings: 2,
         counted: 2, structured: 2, too_long: 1, too_large: 1, nonsense: 3, not_http: 1, watching: 2}
"""What is done, and how often beside the others."""


class Process:
    """What the server holds, as the kernel sees it."""

    def __init__(self, pid):
        self.folder = pathlib.Path(f"/proc/{pid}") if pid else None

    def state(self):
        if not self.folder:
            return {}
        status = dict(line.split(":", 1) for line in (self.folder / "status").read_text().splitlines())
        return {"resident_mib": int(status["VmRSS"].split()[0]) // 1024, "threads": int(status["Threads"]),
                "files": len(list((self.folder / "fd").iterdir()))}


def idle(client):
    """Waits until nothing runs and nothing waits; gives the metrics of then."""
    deadline = time.monotonic() + IDLE_S
    while True:
        metrics = client.metrics()
        busy = [name for name in ("requests_running", "requests_waiting", "kv_pages_used") if metrics[name] != 0]
        if not busy:
            return metrics
        if time.monotonic() > deadline:
            sys.exit(f"FAILED: {', '.join(f'{name} stays {metrics[name]:g}' for name in busy)}")
        time.sleep(0.05)


def settled(process, half):
    """Waits until no more files and threads are there than at half time: connections close late, and threads that prepare prompts
    end some seconds after their last one."""
    deadline = time.monotonic() + IDLE_S
    while True:
        after = process.state()
        if all(after[name] <= half[name] for name in ("files", "threads") if after) or time.monotonic() > deadline:
            return after
        time.sleep(0.05)


def run(soak, clients, seconds, seed):
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=soak.work, args=(seed * 1000 + number, until)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return idle(soak.client)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--pid", type=int, help="of the server, to look at its memory, threads and files")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    soak, process = Soak(Client(args.url, args.key), args.model), Process(args.pid)

    # The first half fills caches and allocators; what the second half adds is a leak.
    before = process.state()
    run(soak, args.clients, args.seconds / 2, args.seed)
    half = process.state()
    metrics = run(soak, args.clients, args.seconds / 2, args.seed + 1)
    after = settled(process, half)

    for (kind, end), count in sorted(soak.counts.items()):
        print(f"{count:8}  {kind} -> {end}")
    print(f"{sum(soak.counts.values()):8}  requests in {args.seconds:g} s")
    print("before", before, "\nhalf  ", half, "\nafter ", after)
    kept = ["requests_running", "requests_waiting", "kv_pages", "kv_pages_used", "kv_pages_cached", "generated_tokens_total", "preemptions_total"]
    print("metrics", {name: metrics[name] for name in kept})

    failures = soak.wrong[:20]
    if whole_chat(soak, random.Random(0)) not in ("stop", "length"):
        failures.append("the server does not answer at the end")
    if after:
        if after["resident_mib"] > half["resident_mib"] + GROWTH_MIB:
            failures.append("memory grew in the second half")
        if after["threads"] > half["threads"]:
            failures.append("threads are left over")
        if after["files"] > half["files"]:
            failures.append("connections are left over")
    if failures:
        sys.exit("\n".join(["FAILED", *failures]))
    print("passed")


if __name__ == "__main__":
    main()
