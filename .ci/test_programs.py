#!/usr/bin/env python3
"""Builds the test programs of the workspace and runs them, several at once: many wait more than they compute.

`cargo test --workspace` runs the same programs one after the other."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS_AT_ONCE = os.cpu_count() + 1
# These take longest, and so begin first.
FIRST = "consort"


def main() -> None:
    programs = sorted(build(), key=lambda program: (program["package"] != FIRST, program["name"]))
    with concurrent.futures.ThreadPoolExecutor(PROGRAMS_AT_ONCE) as pool:
        results = [pool.submit(run, program) for program in programs]
        for result in concurrent.futures.as_completed(results):
            program, _, seconds, output = result.result()
            print(f"\n== {program['package']}: {program['name']}, {seconds:.0f} s\n{output}", end="", flush=True)
    failed = [f"{program['package']}: {program['name']}" for program, status, *_ in (result.result() for result in results) if status != 0]
    if failed:
        sys.exit("\nfailed: " + ", ".join(failed))


def build() -> list[dict]:
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.returncode)
    messages = map(json.loads, built.stdout.splitlines())
    return [program(message) for message in messages if message.get("executable") and message["profile"]["test"]]


def program(message: dict) -> dict:
    folder = Path(message["manifest_path"]).parent
    return {"package": folder.name, "name": message["target"]["name"], "folder": folder, "path": message["executable"]}


def run(program: dict) -> tuple[dict, int, float, str]:
    begun = time.monotonic()
    environment = os.environ | {"CARGO_MANIFEST_DIR": str(program["folder"])}
    ended = subprocess.run([program["path"]], cwd=program["folder"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return program, ended.returncode, time.monotonic() - begun, ended.stdout.decode(errors="replace")


if __name__ == "__main__":
    main()
