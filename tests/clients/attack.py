"""Hostile clients, all at once, beside one honest stream.

    python attack.py --url http://127.0.0.1:8000 --model NAME --key KEY --pid PID --seconds 600

With `--evicts` it goes on until the server has closed a connection because it had too many, which it does only where it may have
fewer than the attack opens. Connections that send nothing, or half of a preface, or that give an answer no window; bodies of megabytes, in one text, in many
parts or values, in a name, in names that multiply, in settings that an answer repeats, in a conversation that is stored, or in
drops; with `--template`, messages that make the model's chat template double a string until it is stopped. Prints
the longest gap between two tokens of the honest stream, the slowest `/health`, and the memory before, at its peak and after. Fails when
the stream is lost, when an answer is not what it has to be, when a kind of client never got the answer that it has to get, when the
server does not answer at the end, or when memory stays.
"""

import argparse
import collections
import http.client
import json
import pathlib
import re
import socket
import sys
import threading
import time

from soak import Client, Wrong, busy

HANGS_S = 600
"""Far longer than it takes until the attack has opened its connections."""
REST_S = 60
"""The longest that a server may take to give memory back."""
GROWTH_MIB = 128
"""What the server may hold beyond what it held before: connections, a warm allocator."""
MIB = 1 << 20
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ONLY_LATER = ("put off", "cut off", "WRONG")
"""How an end begins that says nothing about the request itself."""


class Attack:
    def __init__(self, client, model, pid, until, needs_eviction):
        self.client, self.model, self.pid, self.until = client, model, pid, until
        self.needs_eviction, self.hangs = needs_eviction, until + HANGS_S
        self.counts = collections.Counter()
        self.wrong = []
        self.longest_gap_s = self.slowest_health_s = 0.0
        self.peak_mib = 0

    def runs(self):
        now = time.monotonic()
        return (now < self.until or self.needs_eviction and now < self.hangs) and len(self.wrong) < 20

    def repeat(self, kind):
        """Runs one kind of client until the time is over."""
        while self.runs():
            self.once(kind)

    def once(self, kind):
        try:
            end = kind(self)
        except (Wrong, OSError, http.client.HTTPException, ValueError) as error:
            end = "WRONG"
            self.wrong.append(f"{kind.__name__}: {type(error).__name__} {error}"[:500])
        self.counts[kind.__name__, end] += 1

    def send(self, body, path):
        """Sends a body. The status and text of its response; or `None`, and how it was put off or cut off."""
        try:
            connection, answer = self.client.ask(path, body)
        except (BrokenPipeError, ConnectionResetError):
            return None, "cut off"
        text = answer.read().decode()
        connection.close()
        return (None, f"put off with {answer.status}") if busy(answer) else (answer.status, text)

    def refused(self, body, *codes, path=CHAT):
        """Sends a body that must be refused with one of these codes, or put off, or cut off if it comes slowly."""
        status, text = self.send(body, path)
        if status is None:
            return text
        error = json.loads(text)["error"]
        if error["code"] not in codes:
            raise Wrong(f"status {status}: {text[:300]}")
        if len(text) > 2000:
            raise Wrong(f"an error of {len(text)} bytes")
        return error["code"]

    def answered(self, body, path):
        """Sends a body that must be answered, or put off. The answer, or how it ended."""
        status, text = self.send(body, path)
        if status is None:
            return text
        if status != 200:
            raise Wrong(f"status {status}: {text[:300]}")
        return json.loads(text)

    def is_answered(self, kind):
        """Whether this kind of client has had the answer that it has to get."""
        return any(name == kind.__name__ and not end.startswith(ONLY_LATER) for name, end in self.counts)

    def rss_mib(self):
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024


def honest_stream(attack):
    body = {"model": attack.model, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True,
            "ignore_eos": True, "max_tokens": 64}
    connection, answer = attack.client.ask(CHAT, body)
    if answer.status != 200:
        raise Wrong(f"status {answer.status}: {answer.read()[:300]}")
    last, ended = time.monotonic(), False
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        attack.longest_gap_s, last = max(attack.longest_gap_s, now - last), now
        ended = line.strip() == b"data: [DONE]"
    connection.close()
    if not ended:
        raise Wrong("the stream was lost")
    return "whole"


def health(attack):
    began = time.monotonic()
    status, text = attack.client.get("/health")
    if status != 200:
        raise Wrong(f"status {status}: {text[:300]}")
    attack.slowest_health_s = max(attack.slowest_health_s, time.monotonic() - began)
    attack.peak_mib = max(attack.peak_mib, attack.rss_mib())
    if attack.needs_eviction and attack.client.metrics()["connections_evicted_total"] > 0:
        attack.needs_eviction = False
    time.sleep(0.1)
    return "well"


def long_text(attack):
    return attack.refused(chat(attack, "a" * (7 * MIB)), "context_length_exceeded")


def many_parts(attack):
    parts = [{"type": "text", "text": "a"}] * 150_000
    # What a template makes of so many parts may exceed its memory.
    return attack.refused(chat(attack, parts), "context_length_exceeded", "invalid_value")


def long_name(attack):
    return attack.refused(chat(attack, "x") | {"model": "m" * (7 * MIB)}, "model_not_found")


def long_role(attack):
    body = {"model": attack.model, "messages": [{"role": "r" * (7 * MIB), "content": "x"}]}
    return attack.refused(body, "invalid_value")


def many_values(attack):
    return attack.refused(chat(attack, "x") | {"values": [0] * 2_300_000}, "too_many_values")


def long_namespace(attack):
    """The name of a namespace is repeated in the names of its tools."""
    tools = [{"type": "custom", "name": f"t{number}"} for number in range(500)]
    namespace = {"type": "namespace", "name": "n" * (4 * MIB), "tools": tools}
    return attack.refused(respond(attack, "x") | {"tools": [namespace]}, "invalid_value", path=RESPONSES)


def long_settings(attack):
    """A response repeats the settings of its request, in many events."""
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "string", "description": "d" * (4 * MIB)}}
    return attack.refused(respond(attack, "x") | {"text": {"format": schema}}, "invalid_value", path=RESPONSES)


def many_results(attack):
    """Each result of a tool needs the name of its call."""
    calls = [{"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"} for number in range(4000)]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
    return attack.refused(respond(attack, calls + results), "context_length_exceeded", path=RESPONSES)


def long_history(attack):
    """Continues a stored conversation with megabytes that the prompt leaves out, until it is too long to be stored."""
    input = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r" * (3 * MIB)}]},
             {"role": "user", "content": "x"}]
    body, stored = respond(attack, input) | {"store": True}, []
    try:
        for _ in range(5):
            response = attack.answered(body, RESPONSES)
            if isinstance(response, str):
                return response
            if not response["store"]:
                return "not stored"
            stored.append(response["id"])
            body["previous_response_id"] = response["id"]
        raise Wrong("the conversation grows without a limit")
    finally:
        # What is stored is no leak, but looks like one.
        for id in stored:
            connection, _ = attack.client.ask(f"{RESPONSES}/{id}", None, "DELETE")
            connection.close()


def hosted_tools(attack):
    """The log names tools that the server does not have."""
    tools = [{"type": f"hosted_{number}" + "x" * 1000, "name": "h"} for number in range(2000)]
    body = {"model": attack.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": tools}
    answer = attack.answered(body, "/v1/messages")
    return answer if isinstance(answer, str) else "answered"


def no_window(attack):
    """Asks for a stream over HTTP/2, takes its head, gives it no window, and answers pings."""
    def frame(kind, flags, stream, payload):
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def text(value):  # a length of HPACK has seven bits before it is continued
        return bytes([len(value)]) + value.encode()

    body = json.dumps(chat(attack, "x") | {"stream": True}).encode()
    # POST, http, and by their index in HPACK's table: :path, :authority, authorization, content-type.
    head = b"\x83\x86\x04" + text(CHAT) + b"\x01" + text("localhost") + b"\x0f\x08" + text(attack.client.headers["authorization"])
    head += b"\x0f\x10" + text("application/json")
    with attack.client.connect().sock as sock:
        try:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"\0\4\0\0\0\0"))
            sock.sendall(frame(1, 4, 1, head) + frame(0, 1, 1, body))
            file, got_head = sock.makefile("rb"), False
            while attack.runs():
                sock.settimeout(max(attack.until - time.monotonic(), 1))
                start = file.read(9)
                if len(start) < 9:
                    return "cut off"
                payload, kind, flags = file.read(int.from_bytes(start[:3], "big")), start[3], start[4]
                got_head |= kind == 1
                if kind == 0 and payload:
                    raise Wrong("data without a window")
                if kind in (4, 6) and not flags & 1:  # settings and pings
                    sock.sendall(frame(kind, 1, 0, payload if kind == 6 else b""))
        except TimeoutError:
            return "held" if got_head else "put off"
        except (BrokenPipeError, ConnectionResetError):
            return "cut off"
    return "held"


def drops(attack):
    """Announces a large body, sends a part of it, and waits."""
    head = [f"POST {CHAT} HTTP/1.1", "host: localhost", f"content-length: {7 * MIB}"]
    head += [f"{name}: {value}" for name, value in attack.client.headers.items()]
    with attack.client.connect().sock as sock:
        try:
            sock.sendall("\r\n".join([*head, "", '{"messages": "']).encode() + b"a" * MIB)
            while attack.runs():
                sock.sendall(b"a")
                time.sleep(1)
        except OSError:
            return "cut off"
    return "held"


def template(attack):
    """The template of the test's model doubles a string when it reads this message."""
    return attack.refused(chat(attack, "double"), "chat_template_failed")


def silence(first_bytes):
    def silent_connections(attack):
        """Holds connections for as long as the server lets it."""
        where, held = attack.client.where, []
        while attack.runs():
            try:
                sock = socket.create_connection((where.hostname, where.port), timeout=5)
                sock.sendall(first_bytes)
                held.append(sock)
            except OSError:
                time.sleep(0.1)  # refused, dropped, or no more descriptors here: that is the point
            if len(held) >= CONNECTIONS:
                time.sleep(0.5)
                held = held[CONNECTIONS // 4 :]
        return "held"

    return silent_connections


CONNECTIONS = 200
"""How many connections each kind of silence holds."""


def chat(attack, content):
    return {"model": attack.model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}


def respond(attack, input):
    return {"model": attack.model, "input": input, "max_output_tokens": 1, "store": False}


ANSWERED = [long_text, many_parts, many_values, long_name, long_role, long_namespace, long_settings, many_results, long_history,
            hosted_tools]
"""The kinds that have to get a certain answer."""
KINDS = [honest_stream, health, *ANSWERED, long_text, many_parts, no_window, no_window, drops, drops,
         silence(b""), silence(b"PRI * HTTP/2.0\r\n"), silence(b"GET / HTTP/1.1\r\nhost:")]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "model", "key", "pid"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--template", action="store_true", help="the template answers the message `double` with an attack")
    options.add_argument("--evicts", action="store_true", help="go on until a connection is evicted")
    given = options.parse_args()
    until = time.monotonic() + given.seconds
    attack = Attack(Client(given.url, given.key), given.model, given.pid, until, given.evicts)
    before = attack.rss_mib()
    answered = ANSWERED + [template] * given.template
    kinds = KINDS + [template] * given.template
    threads = [threading.Thread(target=attack.repeat, args=[kind]) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if attack.needs_eviction:
        attack.wrong.append("no connection was evicted")
        attack.needs_eviction = False

    # Those that were only put off get their answers now that the server has time.
    for kind in [*answered, no_window]:
        rested = time.monotonic() + REST_S
        while time.monotonic() < rested and not attack.is_answered(kind):
            attack.until = time.monotonic() + 5
            attack.once(kind)
        if not attack.is_answered(kind):
            attack.wrong.append(f"{kind.__name__} never got its answer")

    rested = time.monotonic() + REST_S
    while (after := attack.rss_mib()) > before + GROWTH_MIB and time.monotonic() < rested:
        time.sleep(0.5)
    for (kind, end), count in sorted(attack.counts.items()):
        print(f"{kind:20} {end:30} {count}")
    print(f"longest gap of the stream {attack.longest_gap_s:.2f} s, slowest /health {attack.slowest_health_s:.2f} s")
    print(f"memory {before} MiB before, {attack.peak_mib} at its peak, {after} after")
    if after > before + GROWTH_MIB:
        attack.wrong.append(f"{after - before} MiB more than before")
    status, _ = attack.client.get("/ready")
    if status != 200:
        attack.wrong.append(f"/ready is {status}")
    if not attack.counts["honest_stream", "whole"]:
        attack.wrong.append("no stream was completed")
    for wrong in attack.wrong:
        print(wrong)
    sys.exit(bool(attack.wrong))


if __name__ == "__main__":
    main()
