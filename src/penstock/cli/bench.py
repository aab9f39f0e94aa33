"""``penstock bench``: measures any server of the OpenAI API, with the flags of ``vllm bench serve``.

Parses flags, prepares and runs the load, prints tables.  ``benchmark.metrics`` defines the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from penstock.cli.benchmark import load_generator, metrics
from penstock.cli.benchmark import workload as benchmark_prompts
from penstock.cli.benchmark.interference import InterferenceScenario, run_interference
from penstock.cli.benchmark.workload import PromptMaker, RequestShape
from penstock.cli.console import TextStyle, text_table
from penstock.cli.openai_client import served_model
from penstock.cli.parsing import COMMANDS
from penstock.config.load import load_client
from penstock.errors import ConfigError
from penstock.http_client import HttpStreamClient, StreamError
from penstock.launch import event_loop

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "send_lag_s": "sent late by"}
"""What the rows are called; docs/benchmarks.md says what they mean."""


def latency_table(rows: Mapping[str, Mapping[str, float] | None]) -> str:
    """Milliseconds, one row a latency; rows without values are left out."""
    present = {name: row for name, row in rows.items() if row}
    columns = list(next(iter(present.values()), {}))
    lines = [(name, *(f"{1000 * row[column]:,.2f}" for column in columns)) for name, row in present.items()]
    return text_table(lines, headers=("milliseconds", *columns), right=range(1, 1 + len(columns)))


def print_measures(paint: TextStyle, title: str, found: Mapping[str, Any]) -> None:
    """One ``metrics.measure``: latencies, then rates, then failures."""
    print(paint(title, "bold"))
    print(latency_table({text: found[key] for key, text in LATENCIES.items()}))
    print(
        f"{found['completed']} of {found['requests']} requests in {found['duration_s']:.2f} s: "
        f"{found['request_throughput']:.3f} requests/s, {found['output_throughput']:.1f} output tokens/s, "
        f"{found['total_token_throughput']:.1f} tokens/s with the prompts'"
    )
    print(
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} of them cached), "
        f"{found['output_tokens']} output tokens" + _per_event(found["tokens_per_event"])
    )
    if found["objectives"]:
        wanted = ", ".join(f"{name[:-2]} <= {1000 * limit:g} ms" for name, limit in found["objectives"].items())
        print(f"goodput: {found['goodput']:.3f} requests/s ({wanted})")
    print_errors(paint, found["errors"])


def _per_event(tokens: float | None) -> str:
    return "" if tokens is None or abs(tokens - 1) < 0.005 else f", {tokens:.2f} an event"


def print_errors(paint: TextStyle, errors: Mapping[str, int]) -> None:
    """Every kind of failure with its number."""
    for kind, count in errors.items():
        print(paint(f"failed: {count} x {kind}", "red"))


def print_interference(paint: TextStyle, found: Mapping[str, Any]) -> None:
    """The report of ``interference.InterferenceResult``."""
    running = found["running"]
    rows = {"before the long prompts": running["itl_before_s"], "while they arrived": running["itl_s"]}
    print(paint("Inter-token latency of the running answers", "bold"))
    print(latency_table(rows))
    print(f"{running['events_per_s']:.1f} events/s in all running answers, for {found['duration_s']:.2f} s")
    print_errors(paint, running["errors"])
    print()
    print_measures(paint, "The long prompts", found["long"])


EPILOG = """\
examples:
  penstock bench --num-prompts 200 --request-rate 4 --random-input-len 256 --random-output-len 64
  penstock bench --dataset-name mooncake --dataset-path conversation_trace.jsonl.gz --length-scale 0.1 --num-prompts 100
  penstock bench --long-prompt-len 2000 --long-prompt-every 1 --running-answers 8 --duration 30 --json > split.json

With --request-rate a request's clock starts when it is due, not when it could be sent.  See docs/benchmarks.md.
"""


ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""The names that ``vllm bench serve`` has for the two ways to ask."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "bench",
        help=COMMANDS["bench"],
        description="Load an OpenAI endpoint and measure TTFT, TPOT, ITL, E2E and goodput.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    _add_server_flags(parser.add_argument_group("server"))
    _add_workload_flags(parser.add_argument_group("workload"))
    _add_arrival_flags(parser.add_argument_group("arrivals"))
    _add_stutter_flags(parser.add_argument_group("long prompts amid running answers"))
    _add_output_flags(parser.add_argument_group("output"))


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="default: PENSTOCK_URL or http://127.0.0.1:8000")
    group.add_argument("--host", help="instead of --base-url, with --port")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument("--backend", choices=list(ENDPOINTS), default="openai", help="default: %(default)s")
    group.add_argument("--endpoint", metavar="PATH", help="default: that of the backend")
    group.add_argument("--model", help="default: the first that /v1/models names")
    group.add_argument("--api-key", metavar="KEY", help="default: PENSTOCK_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="further request headers")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request; default: %(default)g")
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0 (greedy)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for exactly the output length")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further request fields")


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=["random", *benchmark_prompts.TRACES], default="random")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="trace file (.jsonl, .jsonl.gz or .csv)")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="default: %(default)s")
    group.add_argument("--random-input-len", type=int, default=256, metavar="T", help="tokens; default: %(default)s")
    group.add_argument("--random-output-len", type=int, default=64, metavar="T", help="tokens; default: %(default)s")
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by this share")
    group.add_argument("--random-prefix-len", type=int, default=0, metavar="T", help="tokens that all prompts share")
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's lengths")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="multiplies a trace's times")
    group.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and prompts; default: %(default)s")


def _add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--request-rate", type=float, metavar="R", help="per second; default: inf, or the trace's times")
    group.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps: 1 Poisson, less bursts")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at most")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before, not measured")


def _add_stutter_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--long-prompt-len", type=int, metavar="T", help="tokens; asks for this scenario")
    group.add_argument("--long-prompt-every", type=float, default=1.0, metavar="S", help="default: %(default)g")
    group.add_argument("--long-output-len", type=int, default=8, metavar="T", help="default: %(default)s")
    group.add_argument("--running-answers", type=int, default=8, metavar="N", help="default: %(default)s")
    group.add_argument("--duration", type=float, default=30.0, metavar="S", help="default: %(default)g")
    group.add_argument("--warmup", type=float, default=3.0, metavar="S", help="running answers alone, before")


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:500 tpot:50 e2el:2000")
    group.add_argument("--metric-percentiles", default="50,90,99", metavar="P,P", help="default: %(default)s")
    group.add_argument("--json", action="store_true", help="print the result as JSON (seconds) on standard output")
    group.add_argument("--save-result", type=Path, metavar="FILE", help="write the same JSON there")
    group.add_argument("--save-detailed", action="store_true", help="with the times of every request")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """0 when an answer came complete, 1 when none did.  Raises PenstockError when the run could not start."""
    args.endpoint = args.endpoint or ENDPOINTS[args.backend]
    try:
        args.percentiles = _percentiles(args.metric_percentiles)
        args.objectives = metrics.Objectives.parse(args.goodput) if args.goodput else None
        result = event_loop.run(_bench(args))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    text = json.dumps(result, indent=1)
    if args.save_result:
        args.save_result.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        _print(result, TextStyle())
    return 0 if (result["long"] if "running" in result else result)["completed"] else 1


def _print(result: dict[str, Any], paint: TextStyle) -> None:
    print(f"{result['model']} at {result['base_url']}{result['endpoint']}, prompts: {result['prompts']}\n")
    if "running" in result:
        print_interference(paint, result)
    else:
        print_measures(paint, result["workload"], result)
    if result["skipped"]:
        print(f"{result['skipped']} requests of the workload do not fit the context and were left out")


async def _bench(args: argparse.Namespace) -> dict[str, Any]:
    url, key = load_client(f"{args.host}:{args.port}" if args.host else args.base_url, args.api_key)
    headers = _headers(args.header)
    async with HttpStreamClient(url, api_key=key, headers=headers) as client:
        served = await served_model(client, args.model)
        model, max_model_len = served.id, served.max_model_len
        extra = {"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {}) | args.extra_body
        prompts = PromptMaker(client, RequestShape(model=model, endpoint=args.endpoint, extra=extra), args.seed)
        await prompts.learn()
        generator = load_generator.LoadGenerator(client, args.endpoint, timeout=args.timeout)
        await _warm_up(generator, prompts, args)
        scenario = _long_prompts if args.long_prompt_len else _requests
        found = await scenario(args, generator, prompts, max_model_len)
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base_url": url,
        "endpoint": args.endpoint,
        "model": model,
        "prompts": str(prompts.kind),
        "seed": args.seed,
    }
    return header | found


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    parts = [pair.partition("=") for pair in pairs]
    if not all(name and sign for name, sign, _ in parts):
        raise ConfigError("--header: expected NAME=VALUE")
    return {name: value for name, _, value in parts}


async def _warm_up(generator: load_generator.LoadGenerator, prompts: PromptMaker, args: argparse.Namespace) -> None:
    """A few short requests; their failures show that the rest would fail too."""
    if args.num_warmups < 1:
        return
    bodies = await prompts.bodies([benchmark_prompts.RequestSpec(input_len=16, output_len=4)] * args.num_warmups)
    for body in bodies:
        record = generator.record()
        await generator.ask(body, record)
        if not record.ok:
            raise StreamError("the first request failed", record.error or "")


def _wanted(args: argparse.Namespace) -> list[benchmark_prompts.RequestSpec]:
    if args.dataset_name == "random":
        lengths = benchmark_prompts.RandomLengths(
            args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len
        )
        return lengths.draw(args.num_prompts, args.seed)
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    rows = benchmark_prompts.of_trace(args.dataset_path, args.dataset_name, args.num_prompts)
    return [benchmark_prompts.scale_request(row, length=args.length_scale, time=args.time_scale) for row in rows]


def _due_times(args: argparse.Namespace, wanted: Sequence[benchmark_prompts.RequestSpec]) -> list[float]:
    """An explicit rate wins; a trace without one keeps its own times; anything else is due at once."""
    if args.request_rate is None and wanted and wanted[0].at is not None:
        first = wanted[0].at
        return [(w.at or 0.0) - first for w in wanted]
    rate = math.inf if args.request_rate is None else args.request_rate
    return benchmark_prompts.arrivals(len(wanted), rate=rate, burstiness=args.burstiness, seed=args.seed)


async def _requests(
    args: argparse.Namespace,
    generator: load_generator.LoadGenerator,
    prompts: PromptMaker,
    max_model_len: int | None,
) -> dict[str, Any]:
    everything = _wanted(args)
    wanted = benchmark_prompts.fitting(everything, max_model_len)
    if not wanted:
        raise ConfigError(f"none of {len(everything)} requests fits the context of {max_model_len} tokens")
    due = _due_times(args, wanted)
    bodies = await prompts.bodies(wanted)
    jobs = [load_generator.TimedRequest(body, at) for body, at in zip(bodies, due, strict=True)]
    closed_loop = due[-1] == 0
    async with _progress(args, len(jobs)) as progress:
        start = time.perf_counter()
        finished = await generator.run(
            jobs, max_concurrency=args.max_concurrency, closed_loop=closed_loop, progress=progress
        )
        duration = time.perf_counter() - start
    found = {
        "workload": f"{args.dataset_name}, {len(jobs)} requests",
        "request_rate": None if closed_loop else len(jobs) / max(due[-1], 1e-9),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "skipped": len(everything) - len(wanted),
    }
    if args.save_detailed:
        found["detail"] = msgspec.to_builtins(finished)
    return found | metrics.measure(
        finished, duration=duration, percentiles=args.percentiles, objectives=args.objectives
    )


async def _long_prompts(
    args: argparse.Namespace,
    generator: load_generator.LoadGenerator,
    prompts: PromptMaker,
    max_model_len: int | None,
) -> dict[str, Any]:
    count = max(1, round(args.duration / args.long_prompt_every))
    short = benchmark_prompts.RandomLengths(args.random_input_len, args.random_output_len).draw(
        args.num_prompts, args.seed
    )
    long = [benchmark_prompts.RequestSpec(input_len=args.long_prompt_len, output_len=args.long_output_len)] * count
    if len(benchmark_prompts.fitting([*short, *long], max_model_len)) < len(short) + len(long):
        raise ConfigError(f"prompt and answer do not fit the context of {max_model_len} tokens")
    bodies = await prompts.bodies([*short, *long])
    scenario = InterferenceScenario(running=args.running_answers, every=args.long_prompt_every, warmup=args.warmup)
    async with _progress(args, count) as progress:
        result = await run_interference(generator, scenario, bodies[: len(short)], bodies[len(short) :], progress)
    found = {
        "long_prompt_len": args.long_prompt_len,
        "long_prompt_every_s": args.long_prompt_every,
        "running_answers": args.running_answers,
        "skipped": 0,
    }
    if args.save_detailed:
        found["detail"] = result.raw()
    return found | result.report(args.percentiles)


def _percentiles(text: str) -> list[float]:
    percentiles = [float(part) for part in text.split(",")]
    if not all(0 < p < 100 for p in percentiles):
        raise ConfigError(f"--metric-percentiles: between 0 and 100, not {text!r}")
    return sorted(percentiles)


@contextlib.asynccontextmanager
async def _progress(args: argparse.Namespace, total: int) -> AsyncIterator[load_generator.LoadProgress]:
    """Counts for the body to fill, shown twice a second; the garbage collector rests meanwhile."""
    counts = load_generator.LoadProgress(total)
    bar = tqdm(total=total, disable=True if args.disable_tqdm else None, dynamic_ncols=True)

    def draw(note: str) -> None:
        bar.n = counts.done
        bar.set_postfix_str(f"{note}, {counts.output_tokens} tokens", refresh=True)

    async def show() -> None:
        while True:
            draw(f"{counts.sent - counts.done} running, {counts.failed} failed")
            await asyncio.sleep(0.5)

    gc.collect()
    gc.disable()
    try:
        with bar:
            async with load_generator.background([asyncio.create_task(show())]):
                yield counts
            draw(f"{counts.failed} failed")
    finally:
        gc.enable()
