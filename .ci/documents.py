#!/usr/bin/env python3
"""Checks the documents: lines of at most 120 characters, a README of at most 150 lines, an ARCHITECTURE of at most 2,000
words, and links between files whose targets and headings exist. Rows of tables may be longer, because they cannot be
broken."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

COLUMNS_MAX = 120
README_LINES_MAX = 150
ARCHITECTURE_WORDS_MAX = 2000
FENCE = re.compile(r"\s*(```|~~~)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
CODE = re.compile(r"(`+)[^`]+\1")


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
                            check=True, stdout=subprocess.PIPE, text=True).stdout
    # Notes are part of a document elsewhere, from where their links start.
    documents = [path for path in map(Path, listed.split()) if path.exists() and path.name != "notes.md"]
    problems = [problem for path in documents for problem in check(path)]
    lines, words = len(Path("README.md").read_text().splitlines()), len(Path("ARCHITECTURE.md").read_text().split())
    if lines > README_LINES_MAX:
        problems.append(f"README.md has {lines} lines: {README_LINES_MAX} are the limit")
    if words > ARCHITECTURE_WORDS_MAX:
        problems.append(f"ARCHITECTURE.md has {words} words: {ARCHITECTURE_WORDS_MAX} are the limit")
    print("\n".join(problems + [f"{len(documents)} documents, {len(problems)} problems"]))
    sys.exit(1 if problems else 0)


def check(path: Path) -> list[str]:
    problems, prose, in_code = [], [], False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > COLUMNS_MAX and not line.startswith("|"):
            problems.append(f"{path}:{number}: {len(line)} characters: {COLUMNS_MAX} are the limit")
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            prose.append(line)
    # A link may go on in the next line.
    targets = ["".join(groups) for groups in LINK.findall(CODE.sub("", "\n".join(prose)))]
    return problems + [f"{path}: {target} does not exist" for target in targets if not resolves(path, target)]


def resolves(source: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # another host, which is not asked
    name, _, anchor = target.partition("#")
    path = (source.parent / name).resolve() if name else source.resolve()
    return path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings: lower case, without punctuation, numbered where they repeat."""
    found, in_code = [], False
    for line in path.read_text().splitlines():
        in_code ^= bool(FENCE.match(line))
        heading = re.match(r"#{1,6} (.*)", line)
        if heading and not in_code:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            repeats = sum(other == anchor for other, _ in found)
            found.append((anchor, f"{anchor}-{repeats}" if repeats else anchor))
    return frozenset(unique for _, unique in found)


if __name__ == "__main__":
    main()
