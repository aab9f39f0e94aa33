"""What the endpoint picker adds to a request: a real Envoy in front of two real gateways, with and without it.

In each round a client sends requests, one after the other, to each of: a gateway itself, an Envoy that spreads requests
itself (round robin), and an Envoy that asks ``penstock picker`` for each request, without and with an Idempotency-Key.
The request is ``GET /v1/models``, a cheap one, so that what is added is seen: the picker gets headers only, and a long
request costs it no more.  Bar: with the picker, p50 is at most 1 ms more than with Envoy alone.  Exits with 1 when it
is missed.

    scripts/client-packages                              # once: Envoy
    python bench/picker.py                               # 9 rounds of 400 requests each
    python bench/picker.py --clients 8                   # so many at once
    python bench/picker.py --rounds 1 --requests 20 --save picker.json --plot picker.svg
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.http_client import HttpStreamClient

TESTS = Path(__file__).resolve().parents[1] / "tests"
PATH = "/v1/models"
BAR_MS = 1.0
WARM_UP = 50

GATEWAY, PLAIN, SPREAD, KEYED = "gateway", "Envoy", "Envoy with the picker", "Envoy with the picker, keys"


class Client:
    """Sends requests to one of the setups."""

    def __init__(self, url: str, *, keyed: bool) -> None:
        self._url, self._keyed = url, keyed
        self._sent = 0

    async def send(self, count: int) -> list[float]:
        """Seconds of each, one after the other."""
        took = []
        for number in range(0, count, 10):
            # A key for ten requests, as a client makes its head once; the connection is opened before they are timed.
            headers = {"Idempotency-Key": f"bench-{self._sent}"} if self._keyed else {}
            self._sent += 1
            async with HttpStreamClient(self._url, headers=headers) as client:
                await client.get(PATH)
                for _ in range(min(10, count - number)):
                    began = time.perf_counter()
                    reply = await client.get(PATH)
                    took.append(time.perf_counter() - began)
                    if reply.status != 200:
                        raise SystemExit(f"{self._url}: {reply.status} {reply.body.decode()}")
        return took


async def measure(urls: dict[str, str], args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Milliseconds of all requests of each round, by setup."""
    found: dict[str, list[list[float]]] = {name: [] for name in urls}
    clients = {name: [Client(url, keyed=name == KEYED) for _ in range(args.clients)] for name, url in urls.items()}
    for each in clients.values():
        await asyncio.gather(*(client.send(WARM_UP) for client in each))
    names = list(urls)
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = await asyncio.gather(*(client.send(args.requests // args.clients) for client in clients[name]))
            found[name].append([1e3 * each for part in took for each in part])
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(found: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; ``added``: over Envoy alone in the same round."""
    p50 = {name: [statistics.median(each) for each in rounds] for name, rounds in found.items()}
    return {
        name: {
            "p50_ms": statistics.median(p50[name]),
            "p99_ms": statistics.median(quantile(each, 0.99) for each in rounds),
            "added_ms": statistics.median(mine - plain for mine, plain in zip(p50[name], p50[PLAIN], strict=True)),
            "least_ms": min(mine - plain for mine, plain in zip(p50[name], p50[PLAIN], strict=True)),
            "most_ms": max(mine - plain for mine, plain in zip(p50[name], p50[PLAIN], strict=True)),
        }
        for name, rounds in found.items()
    }


def worst_added_ms(rows: dict[str, dict[str, float]]) -> float:
    """What the bar is about: with or without keys, whichever adds more."""
    return max(rows[name]["added_ms"] for name in (SPREAD, KEYED))


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| | p50, ms | p99, ms | p50 over Envoy alone, ms | of rounds |", "|---|---:|---:|---:|---|"]
    for name, row in rows.items():
        more = f"{row['added_ms']:+.2f} | {row['least_ms']:+.2f} to {row['most_ms']:+.2f}" if name != PLAIN else " | "
        lines.append(f"| {name} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {more} |")
    worst = worst_added_ms(rows)
    lines += ["", f"bar: at most {BAR_MS:.2f} ms, is {worst:.2f} ms: {'met' if worst <= BAR_MS else 'MISSED'}"]
    return "\n".join(lines)


def plot(found: dict[str, list[list[float]]], path: Path) -> None:
    """Left: what share of all requests was answered within a time.  Right: p50 of each round over Envoy alone."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
    )
    plain = [statistics.median(each) for each in found[PLAIN]]
    for name, rounds in found.items():
        every = [each for part in rounds for each in part]
        shares = [number / 200 for number in range(200)]
        (line,) = left.plot([quantile(every, share) for share in shares], [100 * each for each in shares], label=name)
        if name in (SPREAD, KEYED):
            added = [statistics.median(mine) - alone for mine, alone in zip(rounds, plain, strict=True)]
            right.plot(range(1, len(added) + 1), added, "o", color=line.get_color(), label=name)
    right.axhline(BAR_MS, color="black", lw=1.5, label="bar")
    left.set(xlabel="milliseconds", ylabel="per cent of requests", xlim=(0, 4 * max(plain)), ylim=(0, 100))
    right.set(xlabel="round", ylabel="p50 over Envoy alone, ms", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def run(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Start all, measure, end all."""
    sys.path.insert(0, str(TESTS))
    import pytest

    from clients.packages import need_envoy
    from cluster.envoy import Envoy, PenstockPicker
    from cluster.server import PenstockServer

    try:
        need_envoy()
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        raise SystemExit(str(missing)) from None
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = [stack.enter_context(PenstockServer(["--aggregated", "--threads", "1"])) for _ in range(2)]
        ports = [server.port for server in servers]
        members = [{"name": f"at-{port}", "endpoint": f"tcp://127.0.0.1:{port}"} for port in ports]
        (folder / "gateways.json").write_text(json.dumps({"members": members}))
        picker = stack.enter_context(PenstockPicker(f"file:{folder / 'gateways.json'}"))
        plain = stack.enter_context(Envoy(folder, ports, None))
        asking = stack.enter_context(Envoy(folder, ports, picker.port, fail_open=False))
        urls = {GATEWAY: servers[0].url, PLAIN: plain.url, SPREAD: asking.url, KEYED: asking.url}
        return asyncio.run(measure(urls, args))


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=400, help="of each setup in a round (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=1, help="at once (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    args = parser.parse_args()
    found = run(args)
    rows: dict[str, Any] = figures(found)
    print(table(rows))
    if args.plot:
        plot(found, args.plot)
    if args.save:
        args.save.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if worst_added_ms(rows) <= BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
