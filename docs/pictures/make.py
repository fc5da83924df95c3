#!/usr/bin/env python3
"""Makes the pictures of the README from the real program, into this folder.

    cargo build --release && sudo python3 docs/pictures/make.py

terminal  a recorded session in a terminal, with the default model (terminal.svg)
page      a question asked in the page, with its answer (page.png)
cluster   three machines with parts of the model, in the page (cluster.png). They are network namespaces, which needs root
split     the three ways to split a model, drawn (split.svg)
speed     the first comparison with llama.cpp in bench/results.md, at two threads, drawn (speed.svg)

Without names, all are made. Needs Linux, Python 3.10, Chromium and iproute2; from Debian: `apt-get install chromium
fonts-noto-core fonts-dejavu-core iproute2`. consort fetches its default model by itself.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import drawings
import screenshots
import terminal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> None:
    options = parse_options()
    names = options.names or list(PICTURES)
    if {"terminal", "page", "cluster"} & set(names):
        if not options.consort.exists():
            sys.exit(f"{options.consort} does not exist: run `cargo build --release`, or name the binary with --consort")
        # The model is fetched before anything is recorded.
        subprocess.run([options.consort, "run", "Hello", "--max-tokens", "1", "--stats=never"], check=True, stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL)  # fmt: skip
    if "cluster" in names and os.geteuid() != 0:
        sys.exit("cluster makes network namespaces, which needs root")
    for name in names:
        path = PICTURES[name](options.consort)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def write(name: str, content: str | bytes) -> Path:
    path = HERE / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


PICTURES = {
    "terminal": lambda consort: write("terminal.svg", terminal.session(consort)),
    "page": lambda consort: write("page.png", screenshots.page(consort)),
    "cluster": lambda consort: write("cluster.png", screenshots.cluster(consort)),
    "split": lambda _: write("split.svg", drawings.split()),
    "speed": lambda _: write("speed.svg", drawings.speed(ROOT / "bench" / "results.md")),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []])
    parser.add_argument("--consort", type=Path, default=ROOT / "target" / "release" / "consort")
    options = parser.parse_args()
    options.consort = Path(os.path.abspath(options.consort))
    return options


if __name__ == "__main__":
    main()
