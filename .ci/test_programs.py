#!/usr/bin/env python3
"""Builds the test programs of the workspace and runs them, several at once: many wait more than they compute.

`cargo test --workspace` runs the same programs one after the other. At the end it lists the tests that did not run because
of what this machine lacks."""

import collections
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS_AT_ONCE = os.cpu_count() + 1
# These take longest, and so begin first.
FIRST = "consort"
# What `testing::needs` prints: program, test, requirement, reason.
NOT_RUN = re.compile(r"did not run: ([^:\s]+)(?:::(\S+))?: no (\w+) \((.*)\)$", re.MULTILINE)


def main() -> None:
    programs, binaries = build()
    programs.sort(key=lambda program: (program["package"] != FIRST, program["name"]))
    with concurrent.futures.ThreadPoolExecutor(PROGRAMS_AT_ONCE) as pool:
        results = [pool.submit(run, program, binaries) for program in programs]
        for result in concurrent.futures.as_completed(results):
            program, _, times, output = result.result()
            print(f"\n== {program['package']}: {program['name']}, {times}\n{output}", end="", flush=True)
    list_what_did_not_run("".join(result.result()[3] for result in results))
    failed = [f"{program['package']}: {program['name']}" for program, status, *_ in (result.result() for result in results) if status != 0]
    if failed:
        sys.exit("\nfailed: " + ", ".join(failed))


def build() -> tuple[list[dict], dict[str, str]]:
    """The test programs, and the variables that name the workspace's binaries to them, as cargo sets them."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.returncode)
    built = [message for message in map(json.loads, built.stdout.splitlines()) if message.get("executable")]
    programs = [program(message) for message in built if message["profile"]["test"]]
    binaries = [message for message in built if message["target"]["kind"] == ["bin"] and not message["profile"]["test"]]
    return programs, {f"CARGO_BIN_EXE_{message['target']['name']}": message["executable"] for message in binaries}


def program(message: dict) -> dict:
    folder = Path(message["manifest_path"]).parent
    return {"package": folder.name, "name": message["target"]["name"], "folder": folder, "path": message["executable"]}


def run(program: dict, binaries: dict[str, str]) -> tuple[dict, int, str, str]:
    begun = time.monotonic()
    environment = os.environ | binaries | {"CARGO_MANIFEST_DIR": str(program["folder"])}
    with tempfile.TemporaryFile() as output:
        running = subprocess.Popen([program["path"]], cwd=program["folder"], env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    times = f"{time.monotonic() - begun:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU"
    return program, running.returncode, times, text


def list_what_did_not_run(output: str) -> None:
    lacking = collections.defaultdict(collections.Counter)
    for name, _, requirement, reason in sorted(set(NOT_RUN.findall(output))):
        lacking[requirement, reason][name] += 1
    for (requirement, reason), counts in lacking.items():
        tests = ", ".join(f"{count} in {name}" for name, count in counts.items())
        print(f"\ndid not run, no {requirement} ({reason}): {tests}")


if __name__ == "__main__":
    main()
