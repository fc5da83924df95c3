#!/usr/bin/env python3
"""What the network costs a chain of machines: overhead of a hop, a token's time with delayed links, throughput of two stages.

    cargo build --release && sudo python3 bench/lan.py

Each machine is a network namespace with one `consort join` of one thread; `consort bench` runs in another namespace and has no layers,
except in the last test. Nothing leaves the namespaces. Without delay, links are veth pairs on a bridge. With delay, links are TUN devices,
and this script passes their packets on when they are due (a kernel without netem can do that too). Needs root and Debian's iproute2.

hops     two stages, no delay: the time of a step that is no stage's computation, for each hop, beyond half a round trip
delay    three stages, 5 ms from machine to machine: a token's time beside four one-way delays plus the computation
streams  four sequences: this machine's first two CPUs with half of the layers each, beside one CPU with all of them
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import compare

KEY = "a key for measurements only"
PORT = 7420
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def main() -> None:
    options = parse_options()
    model = options.model or compare.make_model(options.shape, compare.install_peer())
    layers = len(describe(options, model))
    tests = {"hops": measure_hops, "delay": measure_delay, "streams": measure_streams}
    for name in options.tests or list(tests):
        tests[name](options, model, layers)


def measure_hops(options, model: Path, layers: int) -> None:
    with Machines(options, 2) as machines:
        for _ in range(options.rounds):
            chain, _ = machines.bench(model, split(layers, 2), ["-p", "0", "-n", "256"])
            half = statistics.median(chain["half_round_trip_ms"])
            beyond = {name: gap / chain["hops"] - half for name, gap in chain["gap_ms"].items()}
            print("hops: beyond half a round trip of " + f"{2 * half:.3f} ms: " + ", ".join(f"{name} {value:.3f} ms" for name, value in beyond.items()))


def measure_delay(options, model: Path, layers: int) -> None:
    with Machines(options, 3, delay_s=options.delay_ms / 1000) as machines:
        for _ in range(options.rounds):
            chain, lines = machines.bench(model, split(layers, 3), ["-p", "0", "-n", "64"])
            token = 1000 / statistics.median(next(line["tokens_per_s"] for line in lines if "test" in line))
            one_way = statistics.median(chain["half_round_trip_ms"])
            computed = sum(chain["compute_ms"]) + chain["head_ms"]
            bound = 4 * one_way + computed
            print(f"delay: {token:.2f} ms a token; four one-way delays of {one_way:.2f} ms and {computed:.2f} ms of computation are {bound:.2f} ms: {token / bound:.3f}")


def measure_streams(options, model: Path, layers: int) -> None:
    arguments = ["-p", "0", "-n", "64", "-b", str(options.streams)]
    with Machines(options, 1, cpus=[1]) as machines:
        for _ in range(options.rounds):
            alone = machines.bench_alone(model, arguments, cpu=0)
            # The head counts as layers of the machine that has it: the best of a few splits is the equal one.
            both = {}
            for count in range(layers // 2, layers * 3 // 4 + 1, max(1, layers // 12)):
                _, lines = machines.bench(model, [count], arguments, cpu=0)
                both[count] = statistics.median(next(line["tokens_per_s"] for line in lines if "test" in line))
            best = max(both, key=both.get)
            print(f"streams: {options.streams} sequences, one CPU {alone:.1f} tokens/s, two with {layers - best} and {best} layers {both[best]:.1f}: {both[best] / alone:.2f}")


def split(layers: int, machines: int) -> list[int]:
    """As equal as can be."""
    return [layers * (index + 1) // machines - layers * index // machines for index in range(machines)]


def describe(options, model: Path) -> list:
    shown = subprocess.run([options.consort, "show", str(model), "--json"], capture_output=True, text=True, check=True)
    return [None] * json.loads(shown.stdout)["layers"]


class Machines:
    """Namespaces with `consort join` in all but the first."""

    def __init__(self, options, count: int, delay_s: float = 0, cpus: list[int] | None = None):
        self.options, self.delay_s, self.cpus = options, delay_s, cpus
        self.names = [f"lan-bench-{os.getpid()}-{index}" for index in range(count + 1)]
        self.processes: list[subprocess.Popen] = []
        self.stores: list[tempfile.TemporaryDirectory] = []
        self.relay: Relay | None = None

    def __enter__(self) -> "Machines":
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        if self.delay_s:
            self.relay = Relay(self.names, self.delay_s)
            self.relay.start()
        else:
            connect_with_bridge(self.names)
        for index in range(1, len(self.names)):
            self.join(index)
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.terminate()
            process.wait()
        if self.relay:
            self.relay.is_over = True
            self.relay.join()
        for name in self.names:
            ip("netns", "del", name)
        for store in self.stores:
            store.cleanup()

    def join(self, index: int) -> None:
        store = tempfile.TemporaryDirectory()
        self.stores.append(store)
        command = [self.options.consort, "join", "--listen", f"{address(index)}:{PORT}", "--name", f"machine-{index}", "--no-mdns", "--store", store.name]
        cpu = self.cpus[index - 1] if self.cpus else None
        process = subprocess.Popen(self.within(index, command + ["-t", "1"], cpu), env=environment(), stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        for line in process.stderr:
            if "ready to run layers" in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return
        sys.exit(f"consort join on machine {index} has ended")

    def bench(self, model: Path, counts: list[int], arguments: list[str], cpu: int | None = None) -> tuple[dict, list[dict]]:
        peers = ",".join(f"{address(index + 1)}:{PORT}" for index in range(len(counts)))
        chained = ["--peer", peers, "--split", ",".join(map(str, counts))]
        lines = self.run(model, arguments + chained, cpu)
        return next(line for line in lines if "hops" in line), lines

    def bench_alone(self, model: Path, arguments: list[str], cpu: int) -> float:
        lines = self.run(model, arguments, cpu)
        return statistics.median(next(line["tokens_per_s"] for line in lines if "test" in line))

    def run(self, model: Path, arguments: list[str], cpu: int | None) -> list[dict]:
        command = [self.options.consort, "bench", str(model), "-t", "1", "--json", *arguments]
        done = subprocess.run(self.within(0, command, cpu), env=environment(), capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def within(self, index: int, command: list, cpu: int | None) -> list[str]:
        pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
        return ["ip", "netns", "exec", self.names[index], *pinned, *map(str, command)]


class Relay(threading.Thread):
    """A switch between TUN devices that holds each packet back."""

    def __init__(self, names: list[str], delay_s: float):
        super().__init__(daemon=True)
        self.delay_s, self.is_over = delay_s, False
        self.devices = {bytes(map(int, address(index).split("."))): open_tun(name, index) for index, name in enumerate(names)}

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
                if packet[0] >> 4 == 4 and (target := self.devices.get(packet[16:20])) is not None:
                    count += 1
                    heapq.heappush(held, (time.monotonic() + self.delay_s, count, target, packet))
        for device in files:
            os.close(device)


def open_tun(name: str, index: int) -> int:
    """The device of a machine. It is made in the machine's namespace, by a thread that enters it."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[int] = []

    def make() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        made.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "mtu", "9000", "up")
    return made[0]


def connect_with_bridge(names: list[str]) -> None:
    first = names[0]
    ip("-n", first, "link", "add", "eth0", "type", "bridge")
    for index, name in enumerate(names):
        if index > 0:
            ip("link", "add", f"host{index}", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", first, "link", "set", f"host{index}", "master", "eth0", "up")
        ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def address(index: int) -> str:
    return f"10.79.0.{index + 1}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def environment() -> dict[str, str]:
    return os.environ | {"CONSORT_CLUSTER_KEY": KEY}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("tests", nargs="*", choices=["hops", "delay", "streams", []])
    add("--model", type=Path, help="instead of one that is made")
    add("--shape", default="q8_0", help="of the model that is made: see compare.py")
    add("--delay-ms", type=float, default=5)
    add("--streams", type=int, default=4)
    add("-r", "--rounds", type=int, default=3)
    add("--consort", type=Path, default=compare.HERE.parent / "target" / "release" / "consort")
    return parser.parse_args()


if __name__ == "__main__":
    main()
