"""Do others notice a noisy tenant, or a very long prompt?

Two parts.  ``--real``: real processes (the bundled model, split), a noisy tenant that keeps many long prompts waiting,
and quiet tenants that ask now and then; the quiet ones' time to first token with the noisy one there, by that without,
and once more with everybody under one key.  Otherwise: the engine's own schedulers under a virtual clock, a step taking
12 ms and 0.05 ms a token (the simulator's default fleet), for what the bundled model's context cannot hold: the same
noise, and a prompt of 100,000 tokens amid 32 answers.  Times to first tokens count from when a request is due, also
while a step is under way.

    python bench/fairness.py
    python bench/fairness.py --real --seconds 20
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.config.limits import SchedulingConfig
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import BlockHash, Qos, RequestId, RequestStage, SamplingParams

STEP_S, TOKEN_S = 0.012, 0.05e-3
PARAMETERS = 70_000_000_000  # what a worker knows of the default fleet before its first step
WARM_S = 30.0  # until a scheduler knows how long steps take
NOISE_S = 120.0  # of quiet tenants beside a noisy one
PENSTOCK = [sys.executable, "-m", "penstock"]


# --- schedulers under a virtual clock --------------------------------------------------------------------------------


@dataclass
class Engine:
    """One scheduler, and what its requests got."""

    config: SchedulerConfig
    now: float = 0.0
    asked: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, StepCostModel(cost_prior(PARAMETERS)))

    def ask(self, name: str, prompt: int, answer: int, tenant: str = "", due: float | None = None) -> None:
        """A request comes now, or came when it was ``due``, while a step was under way."""
        self.asked[name] = self.now if due is None else due
        tokens = tuple(random.Random(name).randrange(1 << 30) for _ in range(prompt))
        event = AddRequest(
            id=RequestId(name),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=tokens,
            sampling=SamplingParams(seed=0, max_tokens=answer),
            arrival=self.now,
            root=BlockHash(bytes(32)),
            qos=Qos(tenant=tenant),
        )
        self.scheduler.apply(event, self.now)

    def step(self) -> StepPlan:
        """One step; an idle one takes a millisecond."""
        plan = self.scheduler.plan(self.now)
        rows = sum(row.count for row in plan.rows)
        seconds = STEP_S + TOKEN_S * rows if rows else 0.001
        self.now += seconds
        drawn = [SampledTokens((7,)) if row.samples else SampledTokens() for row in plan.rows]
        for progress in self.scheduler.commit(plan, drawn, self.now, seconds if rows else None).new_tokens:
            self.tokens.setdefault(progress.request.id, []).append(self.now)
        return plan

    def ttft(self, start: str, since: float) -> list[float]:
        """Of requests whose names begin so, and that came after ``since``."""
        named = {name: times[0] for name, times in self.tokens.items() if name.startswith(start)}
        return [first - self.asked[name] for name, first in named.items() if self.asked[name] >= since]

    def gaps(self, start: str, since: float) -> list[float]:
        """Between tokens that came after ``since``."""
        found = [np.diff([t for t in times if t >= since]) for n, times in self.tokens.items() if n.startswith(start)]
        return [float(gap) for gaps in found for gap in gaps]


def settings(**changes: float) -> SchedulerConfig:
    """As ``penstock serve`` sets them by default."""
    default = {"pages": 60_000, "max_model_len": 120_000, "long_prompt_ms": SchedulingConfig().interactive_ttft_ms}
    return SchedulerConfig(**(default | changes))  # type: ignore[arg-type]


@dataclass
class Disturbed:
    """What answers and a long prompt made of each other."""

    gap_ms: float  # p99 between tokens of the answers
    tokens_s: float  # of answers
    ttft_s: float  # of the long prompt
    short_ms: float  # p99 TTFT of short prompts that came meanwhile


def long_prompt(answers: int, *, there: bool, shorts: float = 0.0, seconds: float = 8.0, **config: float) -> Disturbed:
    """A prompt of 100,000 tokens amid answers, ``shorts`` prompts of 500 tokens a second beside it."""
    engine, rng = Engine(settings(**config)), random.Random(3)
    for number in range(max(answers, 1)):
        engine.ask(f"a{number}", 500, 100_000 if answers else 30)
    while len(engine.tokens) < max(answers, 1) or engine.now < WARM_S:
        engine.step()
    begun, number = engine.now, 0
    due = begun + rng.expovariate(shorts) if shorts else float("inf")
    if there:
        engine.ask("long", 100_000, 1)
    while engine.now < begun + seconds or (there and "long" not in engine.tokens):
        while due <= engine.now:
            engine.ask(f"s{number}", 500, 1, due=due)
            number, due = number + 1, due + rng.expovariate(shorts)
        engine.step()
    gaps = engine.gaps("a", begun)
    return Disturbed(
        float(np.quantile(gaps, 0.99)) * 1e3 if gaps else 0.0,
        len(gaps) / (engine.now - begun),
        engine.ttft("long", begun)[0] if there else 0.0,
        float(np.quantile(engine.ttft("s", begun) or [0.0], 0.99)) * 1e3,
    )


def noise(*, noisy: bool, tenants: bool, load: float, **config: float) -> tuple[float, float]:
    """p99 TTFT (ms) of quiet tenants at a worker that only reads prompts, and all tokens a second that it reads."""
    engine, rng = Engine(settings(**config)), random.Random(7)
    due, number, kept = 0.0, 0, 0
    while engine.now < NOISE_S:
        while due <= engine.now:
            engine.ask(f"q{number}", 600, 1, f"quiet-{number % 3}" if tenants else "", due)
            due += rng.expovariate(load / (STEP_S + 600 * TOKEN_S))
            number += 1
        waiting = engine.scheduler.load().queued
        while noisy and waiting < 16:
            engine.ask(f"n{kept}", 8000, 1, "noisy" if tenants else "")
            kept, waiting = kept + 1, waiting + 1
        engine.step()
    read = 600 * len(engine.ttft("q", 0.0)) + 8000 * len(engine.ttft("n", 0.0))
    return float(np.quantile(engine.ttft("q", WARM_S), 0.99)) * 1e3, read / engine.now


READS = (
    ("split: read by another worker", False, {}),
    ("aggregated, as by default", True, {}),
    ("aggregated, steps filled up to 100 ms", True, {"long_prompt_ms": 0.0}),
    ("aggregated, interactive_tpot_ms 16", True, {"long_prompt_ms": 0.0, "step_budget_ms": 16.0}),
)
"""How a long prompt may be read: (as what, at the worker that writes, with which settings)."""


def by_long_prompt() -> None:
    for answers, shorts in ((32, 0.0), (32, 2.0), (4, 0.0)):
        beside = f", {shorts:g} short prompts a second beside it" if shorts else ""
        print(f"a prompt of 100,000 tokens amid {answers} answers{beside} (schedulers, virtual clock)")
        alone = long_prompt(answers, there=False, shorts=shorts)
        for label, here, config in READS:
            with_it = long_prompt(answers, there=here, shorts=shorts, **config)
            ratio = with_it.gap_ms / alone.gap_ms
            short = f"   shorts' p99 TTFT {with_it.short_ms:6.0f} ms" if shorts else ""
            print(
                f"  {label:38s} p99 ITL {alone.gap_ms:5.1f} -> {with_it.gap_ms:5.1f} ms {ratio:5.2f}x"
                f"   {with_it.tokens_s:5.0f} tokens/s   its TTFT {with_it.ttft_s:5.1f} s{short}"
            )
    print("the same with no answer written: how long it is read")
    for label, here, config in READS[1:]:
        if here:
            print(f"  {label:38s} {long_prompt(0, there=True, **config).ttft_s:5.1f} s")


def by_schedulers() -> None:
    by_long_prompt()
    for load in (0.3, 0.6):
        print(f"a noisy tenant, quiet ones at {load:.0%} of a prefill worker (schedulers): their p99 TTFT")
        alone, _ = noise(noisy=False, tenants=True, load=load)
        for label, tenants in (("tenants told apart", True), ("all one tenant", False)):
            there, read_s = noise(noisy=True, tenants=tenants, load=load)
            times = f"{alone:7.1f} ms alone {there:7.1f} ms with it   {there / alone:5.2f}x"
            print(f"  {label:38s} {times}   {read_s:6.0f} prompt tokens/s")


# --- real processes --------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def first_token_s(port: int, key: str, prompt: list[int]) -> float | None:
    """Seconds to the first event of a streamed completion; None when it was not served."""
    body = {"model": "storyteller", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    found = time.perf_counter() - began if response.status == 200 and response.readline() else None
    response.read()
    connection.close()
    return found


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, 4000) for _ in range(count)]


def measured(port: int, keys: dict[str, str], args: argparse.Namespace, *, noisy: bool) -> list[float]:
    """Quiet tenants' times to first token."""
    until, found, lock = time.monotonic() + args.seconds, list[float](), threading.Lock()

    def quiet(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            time.sleep(rng.expovariate(args.rate / 3))
            seconds = first_token_s(port, keys[f"quiet{number}"], tokens_of(rng, args.prompt))
            if seconds is not None:
                with lock:
                    found.append(seconds)

    def loud(number: int) -> None:
        rng = random.Random(1000 + number)
        while time.monotonic() < until:
            first_token_s(port, keys["noisy"], tokens_of(rng, 1500))

    threads = [threading.Thread(target=quiet, args=(number,)) for number in range(3)]
    threads += [threading.Thread(target=loud, args=(number,)) for number in range(args.clients if noisy else 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def by_processes(args: argparse.Namespace) -> None:
    names = ("quiet0", "quiet1", "quiet2", "noisy")
    with tempfile.TemporaryDirectory() as folder:
        path, keys, log_path = Path(folder) / "keys.json", dict[str, str](), Path(folder) / "log"
        for name in names:
            words = [*PENSTOCK, "keys", "add", str(path), "--tenant", name]
            keys[name] = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[0]
        port = free_port()  # last, so that few others can take it before the service does
        words = [*PENSTOCK, "serve", "--port", str(port), "--api-keys", str(path)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            wait_ready(port, process, log_path)
            measured(port, keys, argparse.Namespace(**vars(args) | {"seconds": 3}), noisy=True)
            print(f"a noisy tenant, {args.clients} prompts of 1,500 tokens at a time (real processes): others' TTFT")
            alone = measured(port, keys, args, noisy=False)
            apart = measured(port, keys, args, noisy=True)
            one = measured(port, dict.fromkeys(names, keys["noisy"]), args, noisy=True)
            for label, values in (("alone", alone), ("tenants told apart", apart), ("all one tenant", one)):
                p50, p99 = (float(np.quantile(values, q)) * 1e3 for q in (0.5, 0.99))
                ratio = p99 / (float(np.quantile(alone, 0.99)) * 1e3)
                print(f"  {label:24s} {len(values):5d} requests  p50 {p50:7.1f} ms  p99 {p99:7.1f} ms  {ratio:5.2f}x")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    ended = process.poll()
    how = "was not ready in time" if ended is None else f"ended with status {ended}"
    raise RuntimeError(f"the service {how}; its log:\n{log.read_text()[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="real processes instead of schedulers")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of real processes")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second of all quiet tenants together")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a quiet tenant's prompt")
    parser.add_argument("--clients", type=int, default=12, help="of the noisy tenant")
    args = parser.parse_args()
    if args.real:
        by_processes(args)
    else:
        by_schedulers()


if __name__ == "__main__":
    main()
