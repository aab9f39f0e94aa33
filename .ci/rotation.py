#!/usr/bin/env python3
"""Which shard of the long tests a run of CI takes.

    rotation.py order RECORD COMMITS      all shards, the one to run first
    rotation.py passed RECORD SHARD       notes that a shard passed
    rotation.py failed RECORD SHARD       notes that it did not

A record on the machine holds when each shard last passed, and the shard that did so longest ago comes first.  So eight
green runs have run every shard once, however many commits each of them landed, and a shard that fails stays first until
it passes.  Where a machine has no record, the number of commits decides.  It is all that a fresh clone knows, but
landings of many commits could miss a shard for long by it.  That is why the first run on a machine takes further shards
of this order for as long as it has time (.ci/run).

Which shard a test belongs to follows from its name alone (``--shard`` in tests/conftest.py): no test changes its shard,
and misses a turn, because another one came or went.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

SHARDS = 8
FAILED = -1


def order(ran: Mapping[int, int], commits: int) -> list[int]:
    """All shards: those that failed last, those never run, from the one of the commit count on, those run longest ago.

    ``ran`` has the number of the run in which a shard last passed, counted upwards from 1, or FAILED.
    """
    return sorted(range(SHARDS), key=lambda shard: (ran.get(shard, 0), (shard - commits) % SHARDS))


def after(ran: Mapping[int, int], shard: int, *, passed: bool) -> dict[int, int]:
    """The record once ``shard`` has been run, too."""
    return {**ran, shard: max(0, *ran.values(), 0) + 1 if passed else FAILED}


def read(record: Path) -> dict[int, int]:
    """What the file says; nothing where there is none, or where it is damaged."""
    try:
        ran = {int(shard): int(number) for shard, number in json.loads(record.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    return {shard: number for shard, number in ran.items() if shard in range(SHARDS)}


def write(record: Path, ran: Mapping[int, int]) -> None:
    """In one step: a run that is killed leaves the old record."""
    fresh = record.with_name(f"{record.name}.{os.getpid()}")
    fresh.write_text(json.dumps(dict(sorted(ran.items()))) + "\n")
    fresh.replace(record)


def main() -> None:
    command, record, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if command == "order":
        sys.stdout.write(" ".join(map(str, order(read(record), number))) + "\n")
    elif command in {"passed", "failed"}:
        write(record, after(read(record), number, passed=command == "passed"))
    else:
        sys.exit(f"{command}: expected order, passed or failed")


if __name__ == "__main__":
    main()
