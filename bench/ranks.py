#!/usr/bin/env python3
"""What sharing a model among rank processes costs: N ranks with one thread each beside one process with N threads.

Both sides run `consort bench` on the same file, in turns, several rounds; the table has the medians, the median of the rounds' ratios (the
two sides of a round ran one after the other, so that an hour in which the host is slow is in both), and the share of the ranks' time that
went into collectives: the median of all ranks, and of the one in each round that waited least, which is about what exchanging costs by
itself.
Models are made as for compare.py.
"""
import argparse
import json
import statistics
from pathlib import Path

import compare


def main() -> None:
    options = parse_options()
    libs = compare.install_peer()
    print(f"{options.ranks} ranks with 1 thread each | 1 process with {options.ranks} threads; median of {options.rounds} rounds of {options.repeats} each")
    print("| model | test | ranks, tokens/s | one process | ratio | in collectives |\n|---|---|---|---|---|---|")
    for name in options.models:
        path = compare.make_model(name, libs)
        speeds: dict[tuple[str, str], list[float]] = {}
        shares: list[float] = []
        least: list[float] = []
        for number in range(options.rounds):
            sides = ["ranks", "one"] if number % 2 == 0 else ["one", "ranks"]
            for side in sides:
                lines = bench(options, path, side)
                for line in (line for line in lines if "test" in line):
                    speeds.setdefault((line["test"], side), []).append(statistics.median(line["tokens_per_s"]))
                if ranks := [line["collective_percent"] for line in lines if "rank" in line]:
                    shares += ranks
                    least.append(min(ranks))
        for test in dict.fromkeys(test for test, _ in speeds):
            ranks, one = (statistics.median(speeds[test, side]) for side in ("ranks", "one"))
            ratio = statistics.median(a / b for a, b in zip(speeds[test, "ranks"], speeds[test, "one"]))
            share = f"{statistics.median(shares):.1f} %, least {statistics.median(least):.1f} %"
            print(f"| {name} | {test} | {ranks:.1f} | {one:.1f} | {ratio:.2f} | {share} |", flush=True)


def bench(options: argparse.Namespace, model: Path, side: str) -> list[dict]:
    command = [str(options.consort.resolve()), "bench", str(model), "--json", "-r", str(options.repeats)]
    command += ["-p", str(options.prompt), "-n", str(options.generate)]
    command += ["-t", "1", "--tensor-parallel", str(options.ranks)] if side == "ranks" else ["-t", str(options.ranks)]
    return [json.loads(line) for line in compare.run_quietly(command).splitlines()]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["q8_0", "q4_k_m", "bf16"], help="as in compare.py")
    parser.add_argument("--consort", type=Path, default=compare.HERE.parent / "target/release/consort")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="of each test in a round")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--generate", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
