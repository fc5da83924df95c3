#!/usr/bin/env python3
"""What `consort serve` delivers through HTTP, beside llama.cpp's batched decode alone with no server around it.

    cargo build --release && python3 bench/serve.py

Throughput: so many clients, each asking for one answer after the other over its own connection, for a given time; tokens of all answers per
second, prompts included in the time. llama.cpp decodes as many sequences in one process on the same file and threads.
Both take turns, and the ratio is that of the medians.

First token: of a short request that arrives while a prompt of 2,000 tokens is being computed, against the time that one chunk takes;
and of a request whose first 1,000 tokens are cached, against the same without a cache.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import compare

CHUNK = 512


def main() -> None:
    options = parse_options()
    libs = compare.install_peer()
    print(f"- {options.threads} threads, {options.rounds} rounds of {options.seconds} s, answers of {options.tokens} tokens\n")
    print("| model | clients | consort serve, tokens/s | llama.cpp's batched decode | ratio |\n|---|---:|---:|---:|---:|")
    models = [(name, compare.make_model(name, libs)) for name in options.models]
    for name, path in models:
        ours: dict[int, list[float]] = {clients: [] for clients in options.clients}
        theirs: dict[int, list[float]] = {clients: [] for clients in options.clients}
        for _ in range(options.rounds):
            with server(options, path) as port:
                for clients in options.clients:
                    ours[clients].append(throughput(port, clients, options))
            job = {"job": "speed", "variant": "auto", "model": str(path), "threads": options.threads}
            job |= {"prompt": 0, "generate": options.tokens, "batches": options.clients}
            for result in compare.peer_job(libs, job)["results"]:
                theirs[result["batch"]].append(result["tokens_per_s"])
        for clients in options.clients:
            a, b = statistics.median(ours[clients]), statistics.median(theirs[clients])
            print(f"| {name} | {clients} | {a:.0f} | {b:.0f} | {a / b:.2f} |", flush=True)
    print("\n| model | one chunk, s | first token behind 2,000, s | ratio | 1,000 not cached, s | cached, s | sooner |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, path in models:
        with server(options, path) as port:
            behind = [first_token_behind_prefill(port) for _ in range(options.rounds)]
            prefix = [first_token_with_prefix(port) for _ in range(options.rounds)]
        chunk, first = (statistics.median(column) for column in zip(*behind))
        fresh, cached = (statistics.median(column) for column in zip(*prefix))
        print(f"| {name} | {chunk:.3f} | {first:.3f} | {first / chunk:.2f} | {fresh:.3f} | {cached:.4f} | {fresh / cached:.0f}x |", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(item) for item in text.split(",")]
    add = parser.add_argument
    add("--models", type=lambda text: text.split(","), default=["smollm2", "q8_0"])
    add("-c", "--clients", type=numbers, default=[1, 4, 8, 16])
    add("-t", "--threads", type=int, default=2)
    add("-n", "--tokens", type=int, default=64)
    add("-s", "--seconds", type=float, default=10)
    add("-r", "--rounds", type=int, default=3)
    add("--consort", type=Path, default=compare.HERE.parent / "target" / "release" / "consort")
    return parser.parse_args()


@contextmanager
def server(options: argparse.Namespace, model: Path):
    """A server on a free port, ready to answer; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [options.consort.resolve(), "serve", model, "--port", port, "--threads", options.threads, "--chunk", CHUNK, "--context", 4096, "--served-model-name", "default"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while status(port) != 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(log.read().decode(errors="replace") or "the server did not become ready")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait()


def status(port: int) -> int | None:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except OSError:
        return None


def complete(connection: http.client.HTTPConnection, prompt: list[int], tokens: int) -> dict:
    body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        sys.exit(f"{response.status}: {answer}")
    return answer


def first_token(port: int, prompt: list[int]) -> float:
    """Seconds from the request to the first event of its stream that has text."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    start = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"{response.status}: {response.read()}")
    while not response.readline().startswith(b"data:"):
        pass
    seconds = time.monotonic() - start
    response.read()
    return seconds


def noise(tokens: int) -> list[int]:
    return [random.randrange(100, 40_000) for _ in range(tokens)]


def throughput(port: int, clients: int, options: argparse.Namespace) -> float:
    """Generated tokens per second of all clients together."""
    generated, lock = 0, threading.Lock()
    end = time.monotonic() + options.seconds
    started = time.monotonic()

    def client() -> None:
        nonlocal generated
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while time.monotonic() < end:
            usage = complete(connection, noise(16), options.tokens)["usage"]
            with lock:
                generated += usage["completion_tokens"]

    threads = [threading.Thread(target=client) for _ in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return generated / (time.monotonic() - started)


def first_token_behind_prefill(port: int) -> tuple[float, float]:
    """One chunk's time, and the time to the first token of a short request that comes while 2,000 tokens are computed."""
    chunk = first_token(port, noise(CHUNK))
    long = threading.Thread(target=first_token, args=(port, noise(2000)))
    long.start()
    time.sleep(chunk / 4)
    seconds = first_token(port, noise(8))
    long.join()
    return chunk, seconds


def first_token_with_prefix(port: int) -> tuple[float, float]:
    prefix = noise(1000)
    return first_token(port, prefix + noise(8)), first_token(port, prefix + noise(8))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
