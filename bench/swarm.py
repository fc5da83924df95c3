#!/usr/bin/env python3
"""What a network costs a swarm: tokens per second of a chain of peers beside what round trips plus computation allow.

    cargo build --release -p consort
    sudo python3 bench/swarm.py [chain] [f16] [star] [speculation]

Five machines run `consort swarm serve` with one thread and a fifth of the layers each, and another one `consort serve --swarm`. Machines are
network namespaces, connected as in lan.py: packets take 25 ms from one machine to another, and 1 % of them are lost. Clients are in the
server's namespace, and stream their answers; the time from the first token of an answer to the last one counts.

chain        one sequence, and eight at once: from the client over five peers and back are six one-way delays
f16          the chain with activations of half the bytes
star         the client carries the activations to and from each peer: ten one-way delays
speculation  the chain with draft tokens, on a prompt that repeats itself, beside the same without

Computation is that of `consort bench` in one process with one thread. Two bounds are printed: delays plus computation, and the same with one
round trip for each hop whose packets are lost, which is the least that a loss costs whoever does not send everything twice.
"""

import argparse
import http.client
import json
import math
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import compare
import lan

PEERS = 5
PORT, HTTP_PORT = 4101, 8080
# Of a packet, what the headers of IP, TCP or QUIC, and the frame leave.
PACKET_BYTES = 1340
SENTENCE = "The quick brown fox jumps over the lazy dog. "
TESTS = ["chain", "f16", "star", "speculation"]


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    lan.remove_leftovers()
    random.seed(options.seed)
    model = options.model or compare.make_model(options.shape, None)
    layers = json.loads(compare.run_quietly([options.consort, "show", model, "--json"]))["layers"]
    compute = measure_compute(options, model)
    say("compute", ", ".join(f"{batch} sequences {1000 * seconds:.1f} ms a step" for batch, seconds in compute.items()))
    binaries = {"": options.consort} if options.before is None else {"before: ": options.before, "now: ": options.consort}
    for _ in range(options.rounds):
        for transport in options.transports:
            for name, binary in binaries.items():
                options.consort = binary
                with Swarm(options, model, layers, transport) as swarm:
                    measure(options, swarm, f"{name}over {transport}", compute)


def measure(options, swarm: "Swarm", where: str, compute: dict[int, float]) -> None:
    tests, row_bytes, delays = options.tests or TESTS, options.row_bytes, 1 + PEERS
    chains = {"chain": ([], row_bytes, delays), "f16": (["--swarm-activations", "f16"], row_bytes // 2, delays)}
    chains |= {"star": (["--swarm-star"], row_bytes, 2 * PEERS)}
    for test, (arguments, row_bytes, delays) in chains.items():
        if test in tests:
            with swarm.serve(*arguments) as server:
                for count in options.sequences:
                    tell(options, f"{test} {where}, {count} sequences", server.stream(count, noise), delays, compute[count], count, row_bytes)
    if "speculation" in tests:
        for drafts in (0, options.speculate):
            with swarm.serve("--speculate", drafts) as server:
                result = server.stream(1, lambda: SENTENCE * 12)
                tell(options, f"chain {where}, a repetitive prompt, {drafts} draft tokens", result, 1 + PEERS, compute[1], 1, options.row_bytes)


def tell(options, what: str, result: "Streams", delays: int, compute: float, count: int, row_bytes: int) -> None:
    step = delays * options.delay_ms / 1000 + compute
    packets = math.ceil(row_bytes / PACKET_BYTES)
    lossy = step + delays * (1 - (1 - options.loss) ** packets) * 2 * options.delay_ms / 1000
    bounds = ", ".join(f"{count / bound:.2f} {name} ({result.tokens_per_s * bound / count:.2f})" for name, bound in (("allowed", step), ("with losses", lossy)))
    gaps = sorted(result.gaps)
    at = lambda part: 1000 * gaps[int(part * (len(gaps) - 1))]
    say("swarm", f"{what}: {result.tokens_per_s:.2f} tokens/s, {bounds}; from token to token {at(0.5):.0f} ms, p90 {at(0.9):.0f}, p99 {at(0.99):.0f}, "
        f"mean {1000 * statistics.mean(gaps):.0f}; first token {result.first:.1f} s")  # fmt: skip


def measure_compute(options, model: Path) -> dict[int, float]:
    """Seconds of a step, by its rows."""
    command = [options.consort, "bench", model, "-t", "1", "-p", "0", "-n", "32", "-r", "3", "-b", ",".join(map(str, options.sequences)), "--json"]
    lines = [json.loads(line) for line in compare.run_quietly([*command, *lan.cpu_level(options)]).splitlines()]
    return {line["batch"]: line["batch"] / statistics.median(line["tokens_per_s"]) for line in lines}


class Swarm(lan.Machines):
    """Namespaces with `consort swarm serve` in all but the first."""

    def __init__(self, options, model: Path, layers: int, transport: str):
        super().__init__(options, PEERS, options.delay_ms / 1000, joins=False, loss=options.loss, mtu=1500)
        self.model, self.transport, self.addresses = model, transport, []
        ends = [0]
        for count in lan.split(layers, PEERS):
            ends.append(ends[-1] + count)
        self.blocks = list(zip(ends, ends[1:]))

    def __enter__(self) -> "Swarm":
        super().__enter__()
        for index, (start, end) in enumerate(self.blocks, 1):
            self.peer(index, f"{start}..{end}")
        return self

    def peer(self, index: int, block: str) -> None:
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{self.names[index]}-"))
        ip = f"/ip4/{lan.address(index)}"
        listen = {"tcp": [f"{ip}/tcp/{PORT}"], "quic": [f"{ip}/udp/{PORT}/quic-v1"]}
        listen["both"] = listen["quic"] + listen["tcp"]
        command = [self.options.consort, "swarm", "serve", self.model, "--layers", block, "-t", "1", "--context", "2048"]
        command += ["--identity", f"{folder}/key", "--listen", ",".join(listen[self.transport]), *lan.cpu_level(self.options)]
        process = self.start(index, command + self.bootstrap())
        log = ""
        for line in process.stderr:
            log += line
            if "joined the swarm" in line:
                peer = line.split("peer=")[1].split()[0].strip('"')
                self.addresses.append(",".join(f"{address}/p2p/{peer}" for address in listen[self.transport]))
            if "the block is served" in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return
        sys.exit(f"consort swarm serve on machine {index} has ended: {log}")

    def bootstrap(self) -> list[str]:
        return ["--no-lan"] + (["--bootstrap", self.addresses[0]] if self.addresses else [])

    def serve(self, *arguments) -> "Server":
        return Server(self, [str(argument) for argument in arguments])


class Server:
    """`consort serve --swarm` on the first machine."""

    def __init__(self, swarm: Swarm, arguments: list[str]):
        self.swarm, self.arguments = swarm, arguments

    def __enter__(self) -> "Server":
        options = self.swarm.options
        command = [options.consort, "serve", self.swarm.model, "--swarm", *self.swarm.bootstrap(), "-t", "1", "--context", "2048", "--port", HTTP_PORT]
        command += ["--served-model-name", "m", *self.arguments, *lan.cpu_level(options)]
        self.process = subprocess.Popen(self.swarm.within(0, command), env=lan.environment(), stderr=subprocess.PIPE, text=True)
        log = ""
        for line in self.process.stderr:
            log += line
            if "ready: m" in line:
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                # Peers learn of each other's addresses and round trips.
                time.sleep(options.settle)
                self.stream(1, noise, 8)
                return self
        sys.exit(f"consort serve has ended: {log}")

    def __exit__(self, *_) -> None:
        lan.end(self.process)

    def stream(self, count: int, prompt, tokens: int | None = None) -> "Streams":
        """Answers to so many prompts at once."""
        results: list[tuple[list[float], int, float]] = []
        asked = [threading.Thread(target=lambda: results.append(self.ask(prompt(), tokens or self.swarm.options.tokens))) for _ in range(count)]
        [thread.start() for thread in asked]
        [thread.join() for thread in asked]
        if len(results) < count:
            sys.exit("a stream failed")
        return Streams(results)

    def ask(self, prompt, tokens: int) -> tuple[list[float], int, float]:
        """When each event came, the number of tokens, and when the request was sent."""
        connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT)
        connection.sock = lan.in_namespace(self.swarm.names[0], lambda: socket.create_connection(("127.0.0.1", HTTP_PORT)))
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        begun = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream_options": {"include_usage": True}}), {"Content-Type": "application/json"})
        response, times, completed = connection.getresponse(), [], 0
        while line := response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"{event}")
                completed = (event.get("usage") or {}).get("completion_tokens", completed)
                if event["choices"]:
                    times.append(time.monotonic())
        return times, completed, begun


class Streams:
    def __init__(self, results: list[tuple[list[float], int, float]]):
        begun, ended = min(times[0] for times, *_ in results), max(times[-1] for times, *_ in results)
        # Those after the first one of each.
        self.tokens_per_s = sum(tokens - 1 for _, tokens, _ in results) / (ended - begun)
        # Events of the same step come at once.
        self.gaps = [gap for times, *_ in results for gap in (b - a for a, b in zip(times, times[1:])) if gap > 0.005]
        self.first = statistics.median(times[0] - begun for times, _, begun in results)


def noise() -> list[int]:
    return [random.randrange(100, 40_000) for _ in range(16)]


def say(test: str, what: str) -> None:
    lan.say(test, what)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")
    add = parser.add_argument
    add("tests", nargs="*", choices=[*TESTS, []])
    add("--model", type=Path, help="instead of one that is made")
    add("--shape", default="smollm2", help="of the model that is made: see compare.py")
    add("--row-bytes", type=int, default=576 * 4, help="of the activations of one token")
    add("--transports", type=names, default=["both"], help="of tcp,quic,both: what peers listen on")
    add("--cpu-level", help="hold all machines to these instructions")
    add("--delay-ms", type=float, default=25)
    add("--loss", type=float, default=0.01)
    add("--seed", type=int, default=1, help="of the prompts and the losses")
    add("--sequences", type=lambda text: [int(count) for count in text.split(",")], default=[1, 8])
    add("-n", "--tokens", type=int, default=128)
    add("--speculate", type=int, default=8)
    add("--settle", type=float, default=8, help="seconds from the start of a server to the first measurement")
    add("-r", "--rounds", type=int, default=1)
    add("--consort", type=Path, default=compare.HERE.parent / "target" / "release" / "consort")
    add("--before", type=Path, help="another build of consort, to measure in the same run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
