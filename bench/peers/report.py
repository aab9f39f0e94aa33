"""The figures as Markdown: the bars, then a table a question.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bench.peers.bars import Bar, bars
from bench.peers.places import CODED, OFFLINE_SYSTEMS, PEERS, SERVERS, SHAPES, SPLIT
from bench.peers.records import ABOUT, Record
from bench.peers.series import Path, Series, Spread

MARK = "<!-- peers -->"
"""The lines of a page between which the figures stand."""

Column = tuple[str, Path, float, str]
"""Heading, figure, factor, format."""

DECODE: Sequence[Column] = tuple((f"{n} stream{'s' * (n > 1)}", ("decode", str(n)), 1, ".1f") for n in (1, 4, 16))
PREFILL: Sequence[Column] = tuple((f"{n} tokens", ("prefill", str(n)), 1, ".0f") for n in (128, 512, 2048))


def _client_columns(measure: str) -> Sequence[Column]:
    return (
        ("output tokens/s", (measure, "output_tokens_per_s"), 1, ".1f"),
        ("TTFT p50, s", (measure, "ttft_s", "p50"), 1, ".2f"),
        ("TTFT p99, s", (measure, "ttft_s", "p99"), 1, ".2f"),
        ("ITL p50, ms", (measure, "itl_s", "p50"), 1e3, ".1f"),
        ("ITL p99, ms", (measure, "itl_s", "p99"), 1e3, ".1f"),
    )


STUTTER: Sequence[Column] = (
    ("ITL p50, ms", ("stutter", "itl_s", "p50"), 1e3, ".1f"),
    ("ITL p99, ms", ("stutter", "itl_s", "p99"), 1e3, ".1f"),
    ("longest, ms", ("stutter", "itl_s", "max"), 1e3, ".0f"),
    ("answers, tokens/s", ("stutter", "running_tokens_per_s"), 1, ".1f"),
    ("with prompts, tokens/s", ("stutter", "all_tokens_per_s"), 1, ".0f"),
    ("long prompt alone, s", ("stutter", "alone_s"), 1, ".2f"),
    ("among answers p50, s", ("stutter", "long_ttft_s", "p50"), 1, ".2f"),
)
PROCESS: Sequence[Column] = (
    ("start to first token, s", ("start", "first_token_s"), 1, ".2f"),
    ("PSS, MB", ("memory", "pss"), 1e-6, ".0f"),
    ("of it anonymous", ("memory", "pss_anonymous"), 1e-6, ".0f"),
    ("shared memory", ("memory", "pss_shared_memory"), 1e-6, ".0f"),
    ("files", ("memory", "pss_file"), 1e-6, ".0f"),
)

TABLES: Sequence[tuple[str, Sequence[str], Sequence[Column]]] = (
    ("Decode, tokens/s", OFFLINE_SYSTEMS, DECODE),
    ("Prefill, tokens/s", OFFLINE_SYSTEMS, PREFILL),
    ("Decode of one quantised GGUF file, tokens/s", tuple(CODED), DECODE),
    ("Prefill of one quantised GGUF file, tokens/s", tuple(CODED), PREFILL),
    ("Eight clients over HTTP, prompt 256, answer 64", SERVERS, _client_columns("http8")),
    ("One client over HTTP, prompt 256, answer 64", SERVERS, _client_columns("http1")),
    ("Eight running answers while prompts of 2,000 tokens arrive", SERVERS, STUTTER),
    ("Start and memory of a server", SERVERS, PROCESS),
)


def section(records: Iterable[Record]) -> str:
    """All of it.  A figure is the median over the rounds, with the least and the most beside it."""
    records = list(records)
    lines: list[str] = list(_about(records))
    for model, shape in SHAPES.items():
        series = Series(records, model)
        tables = [table for title, systems, columns in TABLES if (table := _table(series, title, systems, columns))]
        if not tables:
            continue
        lines += ["", f"#### {shape.parameters / 1e6:,.0f} M parameters", "", _roofline(series), ""]
        lines += [*_bars(bars(series, model)), ""]
        lines += ["\n".join([*table, ""]) for table in tables]
    return "\n".join(lines).rstrip() + "\n"


def put_into(page: str, text: str) -> str:
    """The page with ``text`` between its two marks.  Raises ValueError when it has not just two."""
    parts = page.split(MARK)
    if len(parts) != 3:
        raise ValueError(f"the page must have the line {MARK} twice, it has it {len(parts) - 1} times")
    return f"{parts[0]}{MARK}\n\n{text.strip()}\n\n{MARK}{parts[2]}"


def _about(records: Sequence[Record]) -> Iterator[str]:
    abouts = [record for record in records if record.measure == ABOUT]
    if abouts:
        facts, days = abouts[-1].figures, sorted({record.at[:10] for record in records})
        yield (
            f"{' and '.join(dict.fromkeys((days[0], days[-1])))}, {facts['processor']} (family {facts['family']}), "
            f"{facts['cores']} cores, {facts['memory_gib']:g} GiB."
        )


def _roofline(series: Series) -> str:
    read = series.spread("machine", ("roofline", "read_gbs"))
    peak = series.spread("machine", ("roofline", "peak_gflops"))
    if read is None or peak is None:
        return ""
    return (
        f"In the same run ({_rounds(read.rounds)}) memory was read at {_cell(read, 1, '.1f')} GB/s "
        f"and bf16 was multiplied at {_cell(peak, 1, '.0f')} GFLOP/s."
    )


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def _bars(found: Iterable[Bar]) -> Iterator[str]:
    found = list(found)
    if not found:
        return
    yield "| | measured | bar | holds |"
    yield "|---|---:|---:|---|"
    for bar in found:
        against = f" / {bar.against}" if bar.against else ""
        form = ".2f" if bar.unit == "x" else ".0f"
        limit = f"{'<=' if bar.at_most else '>='} {bar.limit:g}{bar.unit}"
        figure = _cell(bar.figure, 1, form, bar.unit)
        yield f"| {bar.name}{against} | {figure} | {limit} | {'yes' if bar.holds else '**no**'} |"


def _table(series: Series, title: str, systems: Sequence[str], columns: Sequence[Column]) -> list[str]:
    rows = []
    rounds = 0
    for system in systems:
        spreads = [series.spread(system, path) for _, path, _, _ in columns]
        if any(spreads):
            rounds = max(rounds, *(spread.rounds for spread in spreads if spread))
            cells = [_cell(spread, by, form) for spread, (_, _, by, form) in zip(spreads, columns, strict=True)]
            rows.append(f"| {_named(system)} | {' | '.join(cells)} |")
    if not rows:
        return []
    head = f"| | {' | '.join(name for name, *_ in columns)} |"
    return [f"**{title}** ({_rounds(rounds)})", "", head, f"|---|{'---:|' * len(columns)}", *rows]


def _named(system: str) -> str:
    maker, _ = CODED.get(system, (system, ""))
    return system if maker in PEERS else f"**{system}**{' (the default)' if system == SPLIT else ''}"


def _cell(spread: Spread | None, by: float, form: str, unit: str = "") -> str:
    if spread is None:
        return ""
    median = f"{spread.median * by:{form}}{unit}"
    return median if spread.rounds == 1 else f"{median} ({spread.least * by:{form}}-{spread.most * by:{form}})"
