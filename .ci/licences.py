#!/usr/bin/env python3
"""Checks that every dependency has a permissive licence and comes from the registry. Reads `cargo metadata`, needs nothing else."""

import json
import re
import subprocess
import sys

# Permissive licences only: consort is MIT OR Apache-2.0, and stays so for whoever ships it.
ALLOWED = {
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
REGISTRY = "registry+"


def main() -> None:
    packages = {package["id"]: package for target in TARGETS for package in metadata(target)}
    problems = [problem for package in packages.values() for problem in check(package)]
    for problem in sorted(problems):
        print(problem)
    print(f"{len(packages)} packages, {len(problems)} problems")
    sys.exit(1 if problems else 0)


def metadata(target: str) -> list[dict]:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["packages"]


def check(package: dict) -> list[str]:
    name, source, licence = f"{package['name']} {package['version']}", package["source"], package["license"]
    problems = []
    if source is not None and not source.startswith(REGISTRY):
        problems.append(f"{name} does not come from the registry: {source}")
    if not licence:
        problems.append(f"{name} names no licence")
    elif not is_allowed(licence):
        problems.append(f"{name} has the licence {licence}")
    return problems


def is_allowed(expression: str) -> bool:
    """Evaluates an SPDX expression. AND binds tighter than OR; `A/B` is an old way to write `A OR B`."""
    tokens = re.findall(r"\(|\)|[^\s()/]+|/", expression.replace(" WITH ", "_WITH_"))
    position = 0

    def alternative() -> bool:
        nonlocal position
        allowed = conjunction()
        while position < len(tokens) and tokens[position] in ("OR", "/"):
            position += 1
            allowed = conjunction() or allowed
        return allowed

    def conjunction() -> bool:
        nonlocal position
        allowed = licence()
        while position < len(tokens) and tokens[position] == "AND":
            position += 1
            allowed = licence() and allowed
        return allowed

    def licence() -> bool:
        nonlocal position
        token = tokens[position] if position < len(tokens) else ""
        position += 1
        if token == "(":
            allowed = alternative()
            position += 1  # the closing bracket
            return allowed
        return token.replace("_WITH_", " WITH ") in ALLOWED

    return alternative() and position == len(tokens)


if __name__ == "__main__":
    main()
