"""Does the simulator foretell a real fleet?  A few real workers here, and the same workers simulated.

    python bench/reality.py                              # calibrates, measures, fits, foretells: 4 to 5 minutes
    python bench/reality.py --fleet here.toml --json seen.json
    python bench/reality.py --fleet here.toml --again seen.json        # fits and foretells what was measured before

Two workloads: prompts of random lengths, whose figures fit what ``calibrate`` cannot see (how much slower writing is
with messages after each step, and everything for each other worker that computes; a message's way, and a prompt's by
its length), and conversations of other lengths at another rate, which are only foretold.  Both are asked of the real
fleet over HTTP at times drawn before; the simulation is given the same requests at the same times.  ITL is the mean of
an answer: what stands between single tokens of a small model is the client's own time.  Nothing else should run on the
machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import chats

from penstock.sim.cluster import SimulationSetup, simulate
from penstock.sim.fleet import SimulatedFleet, load_fleet, parse_workers
from penstock.sim.results import quantiles
from penstock.sim.trace import Trace, TraceRequest
from penstock.types import PAGE_TOKENS

BAR = 0.15
FACTORS = (0.25, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0, 2.4)
FINER = (0.85, 0.92, 0.96, 1.0, 1.04, 1.08, 1.15)
MESSAGES_S = (0.0005, 0.001, 0.002, 0.004, 0.008)
PROMPT_TOKENS_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5)
BESIDE = (0.0, 0.1, 0.25, 0.5, 1.0)
FIGURES = (("ttft_s", "p50"), ("ttft_s", "p90"), ("itl_s", "p50"), ("itl_s", "p90"))
COMPARED = np.linspace(0.05, 0.95, 19)
"""Quantiles whose ratios a fit makes small."""

Figures = dict[str, NDArray[np.float64]]
"""Of each request, in order of arrival."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: when, what, and how long an answer."""

    at: float
    prompt: tuple[int, ...]
    answer: int


def alone(rng: random.Random, options: argparse.Namespace) -> list[Asked]:
    """Prompts that share nothing."""
    at, asked = 0.0, []
    for _ in range(options.requests):
        at += rng.expovariate(options.rate)
        prompt = tuple(rng.randrange(100, 4000) for _ in range(rng.randrange(200, 900)))
        asked.append(Asked(at, prompt, rng.randrange(24, 64)))
    return asked


def conversations(rng: random.Random, options: argparse.Namespace) -> list[Asked]:
    """Prompts that go on from earlier ones, each a while after the one before."""
    system = tuple(100 + i for i in range(128))
    asked: list[Asked] = []
    at = 0.0
    while len(asked) < options.requests:
        at += rng.expovariate(options.rate / 4)
        when, prompt = at, system + tuple(rng.randrange(100, 4000) for _ in range(rng.randrange(100, 400)))
        for _ in range(5):
            asked.append(Asked(when, prompt, rng.randrange(40, 100)))
            prompt += tuple(rng.randrange(100, 4000) for _ in range(rng.randrange(60, 200)))
            when += 4 + rng.expovariate(0.5)
    return sorted(asked, key=lambda each: each.at)[: options.requests]


def as_trace(asked: Sequence[Asked]) -> Trace:
    """The same as the simulator reads it: equal beginnings get equal names, page by page."""
    names: dict[tuple[int, ...], int] = {}
    jobs = []
    for number, each in enumerate(asked):
        ends = range(PAGE_TOKENS, len(each.prompt) + PAGE_TOKENS, PAGE_TOKENS)
        blocks = tuple(names.setdefault(each.prompt[:end], len(names)) for end in ends)
        jobs.append(TraceRequest(number, each.at - asked[0].at, len(each.prompt), each.answer, blocks))
    return Trace("workload", tuple(jobs), PAGE_TOKENS)


# --- the real fleet ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client saw of a request, in seconds from when it was due."""

    sent: float
    times: list[float]  # of tokens


def stream(port: int, model: str, asked: Asked, due: float, heard: dict[float, Heard]) -> None:
    """Ask when it is due, and note when tokens came."""
    time.sleep(max(0.0, due - time.perf_counter()))
    body = {"model": model, "prompt": list(asked.prompt), "max_tokens": asked.answer, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    sent = time.perf_counter() - due
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    times: list[float] = []
    for line in response:
        if line.startswith(b"data: {"):
            now = time.perf_counter() - due
            for choice in json.loads(line[6:]).get("choices", ()):
                times += [now] * len(choice.get("token_ids") or ())
    connection.close()
    heard[asked.at] = Heard(sent, times)


def measured(port: int, model: str, asked: Sequence[Asked]) -> list[Heard]:
    """What clients of the real fleet saw, in order of arrival."""
    heard: dict[float, Heard] = {}
    begin = time.perf_counter() + 0.5 - asked[0].at
    clients = [threading.Thread(target=stream, args=(port, model, each, begin + each.at, heard)) for each in asked]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if len(heard) != len(asked):
        raise RuntimeError(f"{len(asked) - len(heard)} requests failed")
    return [heard[each.at] for each in asked]


def real_figures(heard: Sequence[Heard]) -> Figures:
    """First tokens, and the mean between two of an answer."""
    ttfts = [each.times[0] for each in heard]
    means = [(each.times[-1] - each.times[0]) / (len(each.times) - 1) for each in heard]
    return {"ttft_s": np.array(ttfts), "itl_s": np.array(means)}


def calibrated(options: argparse.Namespace, path: Path) -> str:
    """A fleet file of this machine, with nothing else running yet."""
    words = [*chats.PENSTOCK, "calibrate", *([options.model] if options.model else [])]
    words += ["--threads", "1", "--rounds", str(options.rounds), "--workers", str(options.workers), "--out", str(path)]
    print(subprocess.run(words, check=True, capture_output=True, text=True).stdout, flush=True)
    return str(path)


def asked_for_real(options: argparse.Namespace, loads: dict[str, list[Asked]]) -> dict[str, list[Heard]]:
    """Both workloads at a fleet of real workers."""
    with chats.fleet(options, "penstock") as port:
        model = chats.get(port, "/v1/models")["data"][0]["id"]
        measured(port, model, alone(random.Random(99), argparse.Namespace(requests=40, rate=6.0)))  # everybody warms up
        return {name: measured(port, model, asked) for name, asked in loads.items()}


# --- the simulated one ------------------------------------------------------------------------------------------------


def foretold(trace: Trace, fleet: SimulatedFleet) -> Figures:
    """What clients of the simulated fleet saw."""
    found = simulate(trace, SimulationSetup(fleet=fleet)).results
    means = np.array([each.itl_s for each in found.requests.values()])
    return {"ttft_s": found.ttfts(), "itl_s": means}


def scaled(fleet: SimulatedFleet, numbers: Sequence[float]) -> SimulatedFleet:
    """The fleet with slower answers and messages; what reading takes alone was measured."""
    writing, message_s, prompt_token_s, beside = numbers
    steps = fleet.steps
    slower = {name: getattr(steps, name) * writing for name in ("step_s", "row_s", "context_s")}
    times = msgspec.structs.replace(steps, **slower, beside=beside)
    links = msgspec.structs.replace(fleet.links, message_s=message_s, prompt_token_s=prompt_token_s)
    return msgspec.structs.replace(fleet, steps=times, links=links)


def error(real: Figures, simulated: Figures) -> float:
    """The mean squared logarithm of the ratios of quantiles."""
    ratios = [np.quantile(simulated[name], COMPARED) / np.quantile(real[name], COMPARED) for name in real]
    return float(np.mean(np.log(np.concatenate(ratios)) ** 2))


def fitted(trace: Trace, fleet: SimulatedFleet, real: Figures) -> list[float]:
    """The four numbers with the least error, one by one in turn."""
    best = [1.0, fleet.links.message_s, 0.0, 0.0]
    choices: tuple[Sequence[float], ...] = (FACTORS, MESSAGES_S, PROMPT_TOKENS_S, BESIDE)
    for turn in range(6):
        for place, values in enumerate(choices):
            near = [best[place] * factor for factor in FINER] if best[place] else values
            tried = [[*best[:place], value, *best[place + 1 :]] for value in (values if turn == 0 else near)]
            best = min(tried, key=lambda numbers: error(real, foretold(trace, scaled(fleet, numbers))))
    return best


def compared(real: dict[str, Figures], simulated: dict[str, Figures]) -> float:
    """Print both; the worst ratio of what was only foretold."""
    print("| workload | figure | real | simulated | off by |\n|---|---|---:|---:|---:|")
    worst = 0.0
    for name in real:
        for a, b in FIGURES:
            truth, guess = quantiles(real[name][a])[b], quantiles(simulated[name][a])[b]
            off = guess / truth - 1
            worst = max(worst, abs(off) if name != "alone" else 0.0)
            print(f"| {name} | {a[:-2].upper()} {b} | {truth * 1e3:.2f} ms | {guess * 1e3:.2f} ms | {off:+.0%} |")
    print(f"\nforetold within {worst:.0%}; the bar is {BAR:.0%}: {'met' if worst <= BAR else 'missed'}")
    return worst


def build_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", help="of penstock calibrate; default: it is measured first")
    parser.add_argument("--rounds", type=int, default=2, help="of that measurement")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200, help="of each workload")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="a folder; default: the bundled model")
    parser.add_argument("--json", type=Path, help="write down what clients saw, before anything is fitted")
    parser.add_argument("--again", type=Path, metavar="JSON", help="what they saw then, instead of a fleet")
    return parser


def main() -> None:
    """Measure, fit, foretell, compare."""
    options = build_parser().parse_args()
    options.serve = None  # workers of one gateway, each by itself
    loads = {make.__name__: make(random.Random(options.seed + n), options) for n, make in enumerate(WORKLOADS)}
    with tempfile.TemporaryDirectory() as folder:
        path = options.fleet or calibrated(options, Path(folder) / "here.toml")
        fleet = load_fleet(path).with_groups(*parse_workers(str(options.workers)))
    if options.again:
        heard = msgspec.json.decode(options.again.read_bytes(), type=dict[str, list[Heard]])
    else:
        heard = asked_for_real(options, loads)
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(each) for each in many] for name, many in heard.items()}))
    for name, many in heard.items():
        sent = np.quantile([each.sent for each in many], 0.9) * 1e3
        print(f"{name}: {len(many)} requests, p90 sent {sent:.1f} ms late", flush=True)
    real = {name: real_figures(many) for name, many in heard.items()}
    numbers = fitted(as_trace(loads["alone"]), fleet, real["alone"])
    simulated = {name: foretold(as_trace(asked), scaled(fleet, numbers)) for name, asked in loads.items()}
    writing, message_s, prompt_token_s, beside = numbers
    ways = f"messages {message_s * 1e3:.2f} ms, {prompt_token_s * 1e6:.1f} us a prompt token"
    print(f"fitted on `alone`: writing x {writing:.2f}, beside {beside:.2f}, {ways}\n")
    compared(real, simulated)


WORKLOADS = (alone, conversations)

if __name__ == "__main__":
    main()
