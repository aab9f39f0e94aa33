"""What guessing tokens ahead brings, by workload: tokens a step, and the time of answers against answers without it.

    python bench/speculation.py                          # the bundled model writes stories, alone and eight at a time
    python bench/speculation.py quotes                   # texts that quote their prompt; no model, only tokens
    python bench/speculation.py replay --model DIR       # the quotes' guesses, right and wrong as they were, on a model

``stories`` and ``replay`` turn the engine's own loop in this process, with and without guessing in alternating rounds,
and check that both give the same tokens.  ``quotes`` runs the scheduler with a runner that draws a given text, on a
clock that charges a step the seconds of ``--line``; a prompt is a page of this repository's documents, the answer is
that page with every tenth line left out and every seventh one's words in another order.  ``replay`` needs a model that
may write nonsense: its answer is written once without guessing, and then guessed as often right as the quotes were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from penstock.bundled import storyteller
from penstock.clock import Clock, MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest, EngineEvent
from penstock.engine.core.plan import (
    DraftProposer,
    SampledTokens,
    ScheduledTokens,
    StepOutcome,
    StepPlan,
    accepted_count,
)
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.registry import build_model
from penstock.engine.runner.interface import Runner
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.spec.proposer import NgramProposer
from penstock.kernels.select import make_ops
from penstock.types import PAGE_TOKENS, BlockHash, RequestId, RequestStage, SamplingParams
from penstock.weights.inspect import compute_dtype_for, inspect_model
from penstock.weights.load import load_model

PAGES = ("serve.md", "determinism.md", "compression.md", "operations.md", "security.md")
REQUESTS = (
    "Tell me a story about a little fox who was lost.",
    "Tell me a story about a proud rooster.",
    "Tell me a story about a small green frog with a golden ring.",
    "Tell me a story about two brothers and a donkey.",
    "Tell me a story about a girl who wanted to fly.",
    "Tell me a story about an old clock.",
    "Tell me a story about a bear who could not sleep.",
    "Tell me a story about the wind and a kite.",
)
TOKENS_AT_ONCE = 8
STEP_TOKENS = 64


@dataclass
class Tally:
    """Hands a speculator's words on and keeps count; ``None`` guesses nothing."""

    inner: DraftProposer | None
    steps: int = 0
    tokens: int = 0
    guesses: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (guessed, stood) of each row

    def propose(self, rows: Sequence[ScheduledTokens]) -> Sequence[tuple[int, ...]]:
        return self.inner.propose(rows) if self.inner else ()

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        self.steps += len(rows)
        for row, new in zip(rows, drawn, strict=True):
            self.tokens += len(new.tokens)
            self.guesses.append((len(row.draft), len(new.tokens) - 1))
        if self.inner:
            self.inner.on_step(rows, drawn, seconds)

    def remove_request(self, request: RequestId) -> None:
        if self.inner:
            self.inner.remove_request(request)

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / max(1, self.steps)


class CpuClock:
    """This process's own time, all threads together: for one thread on a machine that is busy with something else."""

    def now(self) -> float:
        return time.process_time()


def clock_of(args: argparse.Namespace) -> Clock:
    """Wall time unless CPU time was asked for."""
    return CpuClock() if args.cpu_time else MonotonicClock()


class ListMailbox:
    """Requests in, answers out."""

    def __init__(self) -> None:
        self.waiting: list[EngineEvent] = []
        self.answers: dict[RequestId, list[int]] = {}
        self.open = 0

    def drain_events(self) -> Iterable[EngineEvent]:
        events, self.waiting = self.waiting, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        pass

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        for progress in outcome.new_tokens:
            self.answers.setdefault(progress.request.id, []).extend(progress.tokens)
            self.open -= progress.finish is not None


class Engine:
    """The loop of an aggregated worker over any runner."""

    def __init__(self, runner: Runner, parameters: int, longest: int) -> None:
        self._runner = runner
        self._cost = cost_prior(parameters)
        self._config = SchedulerConfig(pages=8 * -(-longest // PAGE_TOKENS) + 8, max_model_len=longest)

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, speculator: DraftProposer, clock: Any
    ) -> tuple[list[list[int]], float]:
        """All answers side by side, and the seconds they took after the prompts had been read."""
        mailbox = ListMailbox()
        loop = EngineLoop(mailbox, Scheduler(self._config, StepCostModel(self._cost), speculator), self._runner, clock)
        for number, prompt in enumerate(prompts):
            root = BlockHash(bytes(32))
            name = RequestId(f"r{number}")
            mailbox.waiting.append(
                AddRequest(
                    id=name,
                    epoch=0,
                    stage=RequestStage.WHOLE,
                    prompt=prompt,
                    sampling=sampling,
                    arrival=number,
                    root=root,
                )
            )
        mailbox.open = len(prompts)
        while len(mailbox.answers) < len(prompts):
            loop.step()
        began = clock.now()
        while mailbox.open:
            loop.step()
        return [mailbox.answers[RequestId(f"r{number}")] for number in range(len(prompts))], clock.now() - began


def lookup(clock: Clock | None = None) -> NgramProposer:
    return NgramProposer(most_each=TOKENS_AT_ONCE, most=STEP_TOKENS, clock=clock)


# --- a model ---------------------------------------------------------------------------------------------------------


def model_engine(folder: Path, threads: int, longest: int) -> Engine:
    spec = inspect_model(folder)
    ops = make_ops(compute_dtype=compute_dtype_for(spec, "auto"), threads=threads)
    model = build_model(load_model(folder, spec, ops), ops, min(spec.max_positions, longest))
    kv = ops.new_kv(spec.kv, pages=8 * -(-longest // PAGE_TOKENS) + 8)
    return Engine(ModelRunner(model, ops, kv), spec.parameters, longest)


def stories(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The bundled model, one answer at a time and eight side by side, greedy and sampled."""
    folder = storyteller()
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    prompts = [tokenizer.encode(f"<|begin|><|user|>{text}<|end|><|assistant|>").ids for text in REQUESTS]
    engine = model_engine(Path(folder), args.threads, 1024)
    found = []
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(seed=7, max_tokens=args.tokens, temperature=temperature, stop_token_ids=(1,))
        for batch in (1, len(prompts)):
            groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            name = f"stories, temperature {temperature:g}, {batch} at a time"
            found.append(compared(name, (engine, engine), groups, sampling, lookup, args))
    return found


def compared(
    name: str,
    engines: tuple[Engine, Engine],
    groups: Sequence[Sequence[Sequence[int]]],
    sampling: SamplingParams,
    make: Callable[[Clock], DraftProposer],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Alternating rounds without and with, each on its engine; medians of the rounds' ratios.

    Whoever guesses learns from round to round, as in a worker; a first round is not counted.
    """
    clock, ratios, shares = clock_of(args), list[float](), list[float]()
    speculator = make(clock)
    for _ in range(1 + args.rounds):
        plain, guessing = Tally(None), Tally(speculator)
        took = {}
        for engine, kind in zip(engines, (plain, guessing), strict=True):
            told = [engine.answer(group, sampling, kind, clock) for group in groups]
            took[id(kind)] = (sum(seconds for _, seconds in told), [answers for answers, _ in told])
        (plain_s, wanted), (guessing_s, given) = took[id(plain)], took[id(guessing)]
        if wanted != given:
            raise SystemExit(f"{name}: guessing changed an answer")
        ratios.append(plain_s / guessing_s)
        shares.append(guessing.tokens_a_step)
    ratios, shares = ratios[1:], shares[1:]
    repeated = statistics.mean(repetition(answer) for group in wanted for answer in group)
    return {"workload": name, "tokens_a_step": statistics.median(shares), "speed": spread(ratios), "repeated": repeated}


def repetition(answer: Sequence[int]) -> float:
    """Share of an answer's runs of four tokens that stood in it before."""
    runs = [tuple(answer[at : at + 4]) for at in range(len(answer) - 3)]
    return 1 - len(set(runs)) / max(1, len(runs))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


# --- a text ----------------------------------------------------------------------------------------------------------


class TextRunner:
    """Draws a given answer, and lets a virtual clock pass."""

    def __init__(self, base_s: float, row_s: float) -> None:
        self.base_s, self.row_s = base_s, row_s
        self.time = 0.0
        self.answer: Sequence[int] = ()

    def now(self) -> float:
        return self.time

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        self.time += self.base_s + self.row_s * sum(row.count + len(row.draft) for row in plan.rows)
        return [self._draw(row) for row in plan.rows]

    def remove_request(self, request: RequestId) -> None:
        pass

    def _draw(self, row: ScheduledTokens) -> SampledTokens:
        if not row.samples:
            return SampledTokens()
        at = len(row.request.output)
        tokens = tuple(self.answer[at : at + len(row.draft) + 1])
        return SampledTokens(tokens[: accepted_count(row.draft, tokens)])


def quoting(text: str) -> str:
    """The page, edited."""
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True)):
        if number % 10 == 9:
            continue
        words = line.split(" ")
        lines.append(" ".join(reversed(words)) if number % 7 == 6 else line)
    return "".join(lines)


def quotes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a step of answers that are edited prompts."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer or Path(storyteller()) / "tokenizer.json"))
    base_ms, row_ms = args.line
    found = []
    for page in PAGES:
        text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")[: args.characters]
        prompt, answer = tokenizer.encode(text).ids, tokenizer.encode(quoting(text)).ids
        runner = TextRunner(base_ms / 1e3, row_ms / 1e3)
        runner.answer = answer
        engine = Engine(runner, 1, len(prompt) + len(answer) + 1)
        sampling = SamplingParams(seed=0, max_tokens=len(answer), temperature=0.0)
        plain, guessing = Tally(None), Tally(lookup())
        seconds = [engine.answer([prompt], sampling, kind, runner)[1] for kind in (plain, guessing)]
        speed = seconds[0] / seconds[1]
        found.append(
            {
                "workload": f"{page}, edited",
                "tokens_a_step": guessing.tokens_a_step,
                "speed": spread([speed]),
                "guesses": guessing.guesses,
            }
        )
    return found


class Replay:
    """Guesses a known answer, as often right as another text's guesses were."""

    def __init__(self, answer: Sequence[int], guesses: Sequence[tuple[int, int]]) -> None:
        self._answer = answer
        self._guesses = guesses
        self._at = 0

    def propose(self, rows: Sequence[ScheduledTokens]) -> Sequence[tuple[int, ...]]:
        (row,) = rows
        guessed, stood = self._guesses[self._at]
        self._at += 1
        done = len(row.request.output)
        right = list(self._answer[done : done + guessed])
        if stood < len(right):
            right[stood] += 1 if right[stood] == 0 else -1
        return [tuple(right[: max(0, row.request.local_end - row.request.known - 1)])]

    def on_step(self, rows: Sequence[ScheduledTokens], drawn: Sequence[SampledTokens], seconds: float) -> None:
        pass

    def remove_request(self, request: RequestId) -> None:
        pass


def replay(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each page's guesses on a model's own answer, one stream."""
    engine = model_engine(args.model, args.threads, 64 + args.tokens)
    sampling = SamplingParams(seed=0, max_tokens=args.tokens, temperature=0.0)
    prompt = list(range(1000, 1064))
    (answer,), _ = engine.answer([prompt], sampling, Tally(None), MonotonicClock())
    found = []
    for one in quotes(args):
        guesses = Random(7).choices(one["guesses"], k=args.tokens)

        def make(clock: Clock, guesses: Sequence[tuple[int, int]] = guesses) -> Replay:
            return Replay(answer, guesses)

        found.append(compared(one["workload"], (engine, engine), [[prompt]], sampling, make, args))
    return found


Mode = Callable[[argparse.Namespace], list[dict[str, Any]]]

MODES: dict[str, Mode] = {"stories": stories, "quotes": quotes, "replay": replay}


def arguments(about: str | None, modes: Iterable[str]) -> argparse.ArgumentParser:
    """What every comparison of this kind is asked; each adds its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=tuple(modes), default="stories")
    parser.add_argument("--model", type=Path, help="of replay")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="measure this process's own time; with --threads 1")
    parser.add_argument("--json", action="store_true")
    return parser


def run(parser: argparse.ArgumentParser, modes: Mapping[str, Mode]) -> int:
    """The mode that was asked for, measured and shown."""
    args = parser.parse_args()
    if args.mode == "replay" and args.model is None:
        parser.error("replay needs --model")
    began = time.monotonic()
    show(modes[args.mode](args), as_json=args.json)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def main() -> int:
    parser = arguments(__doc__, MODES)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for the quotes (default: the bundled model's)")
    parser.add_argument("--line", type=float, nargs=2, default=(34.0, 1.0), metavar="MS", help="of a step, of a row")
    parser.add_argument("--characters", type=int, default=3000, help="of a page")
    return run(parser, MODES)


def show(found: list[dict[str, Any]], *, as_json: bool) -> None:
    """A line a workload, or all as JSON."""
    for one in found:
        one.pop("guesses", None)
        if not as_json:
            speed = one["speed"]
            more = f", {100 * one['repeated']:.0f} % repeated" if "repeated" in one else ""
            print(
                f"{one['workload']:45s} {one['tokens_a_step']:.2f} tokens a step, {speed['median']:.2f}x "
                f"({speed['least']:.2f}-{speed['most']:.2f}){more}"
            )
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
