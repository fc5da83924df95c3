#!/usr/bin/env python3
"""What a network costs a chain of machines: hops, delay, several streams, sending weights; and whether the plan predicts it.

    cargo build --release -p consort && cargo build --release -p cluster --example transfer
    sudo python3 bench/lan.py [hops] [delay] [streams] [predict] [weights]

Each machine is a network namespace with one `consort join` of one thread; `consort bench` runs in another namespace. Nothing leaves the
namespaces. Without delay, links are veth pairs on a bridge. With delay, links are TUN devices, and this script passes their packets on when
they are due: that works in kernels without netem, too. Needs root and Debian's iproute2 and util-linux. Namespaces and processes end with
the script, also after an error; what a killed script has left is removed by the next one.

hops     two stages, no delay: the time of a step that is no stage's computation, for each hop, beyond half a round trip
delay    three stages, 5 ms from machine to machine: a token's time beside four one-way delays plus the computation
streams  several sequences, and a prompt: this machine's first two CPUs with half of the layers each, beside one CPU with all of them
predict  the plan's prediction beside what is measured: the best plan and other splits, alone and in batches, without and with delay
weights  the transfer of weights beside plain TCP and one core's encryption, on loopback and on links of 1 and 2.5 Gbit/s; and what a machine
         receives at a first and at a second start
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import compare
import cores

KEY = "a key for measurements only"
PORT = 7420
PREFIX = "lan-bench"
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def main() -> None:
    options = parse_options()
    # So that namespaces and processes end with the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    remove_leftovers()
    model = options.model or compare.make_model(options.shape, compare.install_peer())
    layers = json.loads(compare.run_quietly([options.consort, "show", model, "--json"]))["layers"]
    tests = {"hops": measure_hops, "delay": measure_delay, "streams": measure_streams, "predict": measure_prediction}
    tests["weights"] = measure_weights
    for name in options.tests or list(tests):
        tests[name](options, model, layers)


def measure_hops(options, model: Path, layers: int) -> None:
    with Machines(options, 2) as machines:
        for _ in range(options.rounds):
            chain, _ = machines.bench(model, ["-p", "0", "-n", "256", "-r", "1"], split(layers, 2))
            half = statistics.median(chain["half_round_trip_ms"])
            beyond = {name: gap / chain["hops"] - half for name, gap in chain["gap_ms"].items()}
            say("hops", f"beyond half a round trip of {2 * half:.3f} ms: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in beyond.items()))


def measure_delay(options, model: Path, layers: int) -> None:
    with Machines(options, 3, delay_s=options.delay_ms / 1000) as machines:
        for _ in range(options.rounds):
            chain, rates = machines.bench(model, ["-p", "0", "-n", "64", "-r", "1"], split(layers, 3))
            token = 1000 / rates["tg64", 1]
            computed = sum(chain["compute_ms"]) + chain["head_ms"]
            bound = 4 * options.delay_ms + computed
            trips = ", ".join(f"{half:.2f}" for half in chain["half_round_trip_ms"])
            say("delay", f"{token:.2f} ms a token; four delays of {options.delay_ms:g} ms (half round trips: {trips}) and "
                f"{computed:.2f} ms of computation are {bound:.2f} ms: {token / bound:.3f}")  # fmt: skip


def measure_streams(options, model: Path, layers: int) -> None:
    """A chain of two stages runs steps of half of the rows, so it gains no more than a step of all rows takes longer than one of half."""
    if options.slow:
        return measure_slow_streams(options, model, layers)
    batches = sorted({count for streams in options.streams for count in (streams // 2, streams)})
    arguments = ["-p", "512", "-n", "48", "-r", "2", *cpu_level(options)]
    say("streams", f"two threads over one, plain arithmetic: {cores.two_threads_over_one():.2f}")
    with Machines(options, 1, cpus=[1]) as machines:
        first = ["-p", "0", "-n", "16", "-b", str(options.streams[0]), *cpu_level(options)]
        chain, _ = machines.bench(model, first, [layers // 2], cpu=0)
        # The head counts as layers of the machine that has it.
        head = chain["head_ms"] / (sum(chain["compute_ms"]) / layers)
        count = min(layers, round((layers + head) / 2))
        for _ in range(options.rounds):
            one = machines.bench_alone(model, [*arguments, "-b", ",".join(map(str, batches))], cpu=0)
            _, two = machines.bench(model, [*arguments, "-b", ",".join(map(str, options.streams))], [count], cpu=0)
            say("streams", f"two CPUs with {layers - count} and {count} layers over one: prompt of 512 tokens {two['pp512', 1] / one['pp512', 1]:.2f}")
            for streams in options.streams:
                tell_streams(streams, two["tg48", streams], one["tg48", streams], one["tg48", streams // 2])


def measure_slow_streams(options, model: Path, layers: int) -> None:
    """Stages that wait nine tenths of the time do not compete for the CPUs. The head is on a machine without layers."""
    batches = sorted({count for streams in options.streams for count in (streams // 2, streams)})
    arguments = ["-p", "0", "-n", "16", "-r", "1", *cpu_level(options)]
    with Machines(options, 2, slow=True) as machines:
        for _ in range(options.rounds):
            _, one = machines.bench(model, [*arguments, "-b", ",".join(map(str, batches))], [layers, 0])
            _, two = machines.bench(model, [*arguments, "-b", ",".join(map(str, options.streams))], split(layers, 2))
            for streams in options.streams:
                tell_streams(streams, two["tg16", streams], one["tg16", streams], one["tg16", streams // 2])


def tell_streams(streams: int, two: float, one: float, one_with_half: float) -> None:
    whole, half = streams / one, streams // 2 / one_with_half
    say("streams", f"{streams} sequences: {two:.1f} tokens/s, {one:.1f} on one: {two / one:.2f}; "
        f"steps of {streams // 2} and {streams} rows take {1000 * half:.1f} and {1000 * whole:.1f} ms: {whole / half:.2f} at most")  # fmt: skip


def measure_prediction(options, model: Path, layers: int) -> None:
    third = layers // 3
    for delay_ms in (0, options.delay_ms):
        with Machines(options, 2, delay_s=delay_ms / 1000) as machines:
            for counts in (None, split(layers, 2), [third, third], [layers - 2 * third, 0], [layers * 3 // 4, layers // 4]):
                for _ in range(options.rounds):
                    chain, rates = machines.bench(model, ["-p", "0", "-n", "64", "-r", "1"], counts)
                    tell_prediction(f"{delay_ms:g} ms, {counts or 'the best plan'}", 1, chain["predicted_tokens_per_s"], rates["tg64", 1], chain)
    say("predict", f"two threads over one, plain arithmetic: {cores.two_threads_over_one():.2f}")
    # Stages that run at the same time need a CPU each.
    with Machines(options, 1, cpus=[1]) as machines:
        for batch in options.streams:
            for counts in ([0], [layers // 2], [layers]):
                for _ in range(options.rounds):
                    chain, rates = machines.bench(model, ["-p", "0", "-n", "64", "-r", "1", "-b", str(batch)], counts, cpu=0)
                    tell_prediction(f"0 ms, {counts}", batch, chain["predicted_batch_tokens_per_s"], rates["tg64", batch], chain)


def tell_prediction(what: str, batch: int, predicted: float, measured: float, chain: dict) -> None:
    parts = ", ".join(f"{ms:.1f}" for ms in chain["compute_ms"])
    say("predict", f"{what}, {batch} sequences: predicted {predicted:.2f}, measured {measured:.2f} tokens/s: {predicted / measured:.3f} "
        f"(stages {parts} ms, head {chain['head_ms']:.1f}, gap {chain['gap_ms']['median']:.2f})")  # fmt: skip


def measure_weights(options, model: Path, layers: int) -> None:
    example = options.consort.parent / "examples" / "transfer"
    with Machines(options, 0) as machines:
        tell("loopback", compare.run_quietly(machines.within(0, [example, "1"])))
    for gigabits in (1, 2.5):
        with Machines(options, 1, joins=False, rate=f"{gigabits}gbit") as machines:
            where = [f"{address(1)}:{PORT}", "0.3"]
            receiver = machines.start(1, [example, "receive", *where])
            time.sleep(5)
            shown = compare.run_quietly(machines.within(0, [example, "send", *where]))
            receiver.wait()
            tell(f"{gigabits} Gbit/s", shown)
            sent = float(re.search(r"transfer, .* ([\d.]+) GB/s", shown)[1])
            say("weights", f"{gigabits} Gbit/s: the transfer takes {sent * 8 / gigabits:.0%} of it")
    with Machines(options, 1) as machines:
        for start in ("first", "second"):
            before, begun = machines.received_bytes(1), time.monotonic()
            machines.bench(model, ["-p", "0", "-n", "1", "-r", "1"], [layers])
            took = time.monotonic() - begun
            megabytes = (machines.received_bytes(1) - before) / 1e6
            say("weights", f"{start} start: the machine received {megabytes:.3f} MB (2.1 MB measure the link) in {took:.1f} s")


def tell(link: str, shown: str) -> None:
    for line in shown.splitlines():
        say("weights", f"{link}: {line}")


def split(layers: int, machines: int) -> list[int]:
    """As equal as can be."""
    return [layers * (index + 1) // machines - layers * index // machines for index in range(machines)]


class Machines:
    """Namespaces with `consort join` in all but the first. With a delay, this part of the packets may be lost."""

    def __init__(self, options, count: int, delay_s: float = 0, cpus: list[int] | None = None, joins: bool = True, rate: str | None = None,
                 slow: bool = False, loss: float = 0, mtu: int = 9000):  # fmt: skip
        self.options, self.delay_s, self.cpus, self.joins, self.rate, self.slow = options, delay_s, cpus, joins, rate, slow
        self.loss, self.mtu = loss, mtu
        self.names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(count + 1)]
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> "Machines":
        with contextlib.ExitStack() as stack:
            self.stack = stack
            for name in self.names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            if self.delay_s:
                self.relay = stack.enter_context(Relay(self.names, self.delay_s, self.loss, self.mtu))
            else:
                connect_with_bridge(self.names)
            for name in self.names if self.rate else []:
                limit = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit], check=True)
            for index in range(1, len(self.names) if self.joins else 0):
                self.join(index)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def join(self, index: int) -> None:
        store = self.stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{self.names[index]}-"))
        command = [self.options.consort, "join", "--listen", f"{address(index)}:{PORT}", "--name", f"machine-{index}", "--no-mdns"]
        command += ["--store", f"{store}/tensors", "-t", "1", *cpu_level(self.options)]
        # Steps take ten times as long as their computation: see `cluster::node::NodeFault`.
        fault = {"CONSORT_FAULT": f"at=decode,after=0,do=slow,once={store}/fault"} if self.slow else {}
        process = self.start(index, command, self.cpus[index - 1] if self.cpus else None, fault)
        for line in process.stderr:
            if "ready to run layers" in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return
        sys.exit(f"consort join on machine {index} has ended")

    def start(self, index: int, command: list, cpu: int | None = None, variables: dict | None = None) -> subprocess.Popen:
        process = subprocess.Popen(self.within(index, command, cpu), env=environment() | (variables or {}), stderr=subprocess.PIPE, text=True)
        self.stack.callback(end, process)
        return process

    def bench(self, model: Path, arguments: list[str], counts: list[int] | None, cpu: int | None = None) -> tuple[dict, dict]:
        """What `consort bench` says of the chain, and tokens per second by test and batch. With no `counts`, by the best plan."""
        peers = ",".join(f"{address(index)}:{PORT}" for index in range(1, len(self.names)))
        chained = ["--node", peers] + (["--split", ",".join(map(str, counts))] if counts else [])
        lines = self.run(model, arguments + chained, cpu)
        return next(line for line in lines if "hops" in line), tokens_per_s(lines)

    def bench_alone(self, model: Path, arguments: list[str], cpu: int) -> dict:
        return tokens_per_s(self.run(model, arguments, cpu))

    def run(self, model: Path, arguments: list[str], cpu: int | None) -> list[dict]:
        command = [self.options.consort, "bench", str(model), "-t", "1", "--json", *arguments]
        done = subprocess.run(self.within(0, command, cpu), env=environment(), capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def within(self, index: int, command: list, cpu: int | None = None) -> list[str]:
        # A process ends with this one, even if this one is killed.
        pinned = ["setpriv", "--pdeathsig", "KILL", "--"] + ([] if cpu is None else ["taskset", "-c", str(cpu)])
        return ["ip", "netns", "exec", self.names[index], *pinned, *map(str, command)]

    def received_bytes(self, index: int) -> int:
        shown = subprocess.run(["ip", "-n", self.names[index], "-s", "-j", "link", "show", "eth0"], check=True, capture_output=True)
        return json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]


class Relay(threading.Thread):
    """A switch between TUN devices that holds each packet back, and loses some."""

    def __init__(self, names: list[str], delay_s: float, loss: float, mtu: int):
        super().__init__(daemon=True)
        self.delay_s, self.loss, self.is_over = delay_s, loss, False
        self.devices = {bytes(map(int, address(index).split("."))): open_tun(name, index, mtu) for index, name in enumerate(names)}

    def __enter__(self) -> "Relay":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.is_over = True
        self.join()

    def run(self) -> None:
        held: list[tuple[float, int, int, bytes]] = []
        count, files = 0, list(self.devices.values())
        while not self.is_over:
            now = time.monotonic()
            while held and held[0][0] <= now:
                _, _, device, packet = heapq.heappop(held)
                os.write(device, packet)
            wait = min(0.1, held[0][0] - now) if held else 0.1
            # The last part of a wait is spun: sleeping ends late.
            for device in select.select(files, [], [], max(0, wait - 1e-4))[0]:
                packet = os.read(device, 65536)
                # The destination of an IPv4 packet.
                if packet[0] >> 4 == 4 and (target := self.devices.get(packet[16:20])) is not None and random.random() >= self.loss:
                    count += 1
                    heapq.heappush(held, (time.monotonic() + self.delay_s, count, target, packet))
        for device in files:
            os.close(device)


def in_namespace(name: str, task):
    """What `task` returns in a thread that has entered the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter():
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return task()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(enter).result()


def open_tun(name: str, index: int, mtu: int) -> int:
    """The device of a machine, made in its namespace."""

    def make() -> int:
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        return device

    device = in_namespace(name, make)
    ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "mtu", str(mtu), "up")
    return device


def connect_with_bridge(names: list[str]) -> None:
    first = names[0]
    ip("-n", first, "link", "add", "eth0", "type", "bridge")
    for index, name in enumerate(names):
        if index > 0:
            ip("link", "add", f"host{index}", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", first, "link", "set", f"host{index}", "master", "eth0", "up")
        ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def remove_leftovers() -> None:
    """Namespaces and stores of scripts that were killed. Their processes have ended with them."""
    is_left = lambda name: (found := re.match(rf"{PREFIX}-(\d+)-", name)) and not Path(f"/proc/{found[1]}").exists()
    for name in filter(is_left, compare.run_quietly(["ip", "netns", "list"]).split()):
        ip("netns", "del", name)
    for store in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if is_left(store.name):
            shutil.rmtree(store)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def address(index: int) -> str:
    return f"10.79.0.{index + 1}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def environment() -> dict[str, str]:
    return os.environ | {"CONSORT_CLUSTER_KEY": KEY}


def cpu_level(options) -> list[str]:
    return ["--cpu-level", options.cpu_level] if options.cpu_level else []


def tokens_per_s(lines: list[dict]) -> dict:
    return {(line["test"], line["batch"]): statistics.median(line["tokens_per_s"]) for line in lines if "test" in line}


def say(test: str, what: str) -> None:
    print(f"{test}: {what}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("tests", nargs="*", choices=["hops", "delay", "streams", "predict", "weights", []])
    add("--model", type=Path, help="instead of one that is made")
    add("--shape", default="q8_0", help="of the model that is made: see compare.py")
    add("--cpu-level", help="hold all machines to these instructions")
    add("--delay-ms", type=float, default=5)
    add("--slow", action="store_true", help="streams: stages that wait; with a debug build, where two CPUs are not two cores")
    add("--streams", type=lambda text: [int(count) for count in text.split(",")], default=[4, 16])
    add("-r", "--rounds", type=int, default=3)
    add("--consort", type=Path, default=compare.HERE.parent / "target" / "release" / "consort")
    return parser.parse_args()


if __name__ == "__main__":
    main()
