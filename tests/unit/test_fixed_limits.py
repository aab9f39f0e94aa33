"""Limits that nobody can set: each is what it was chosen to be, and what docs/limits.md says.

Most tests of them work with smaller ones, so none of those sees a product's limit that grows a thousand times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import sse
from penstock.engine.service import gateways, kv_events
from penstock.grammar import matcher
from penstock.kv.transfer import sender
from penstock.launch import channel
from penstock.weights import manifest
from penstock.wire import codec, page_doors, zeromq

MIB = 1 << 20
LIMITS_PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs/limits.md").read_text().split())


@pytest.mark.parametrize(
    ("module", "values", "said"),
    [
        (codec, {"MAX_FRAME_BYTES": 32 * MIB, "MAX_PAYLOAD_BYTES": 64 * MIB}, ("32 MiB a message", "64 MiB a payload")),
        (zeromq, {"QUEUE_MESSAGES": 16_384, "RECEIVED_MESSAGES": 1024}, ("16,384 messages", "1,024 of one peer")),
        (gateways, {"LOGPROBS_AT_ONCE": 8192}, ("8,192 log-probabilities",)),
        (sender, {"FIRST_ANNOUNCED_BYTES": MIB // 2, "ANNOUNCED_BYTES": 8 * MIB, "MAX_WAITING_PULLS": 4096}, ()),
        (page_doors, {"MOST_ANNOUNCED": 1024}, ()),
        (kv_events, {"MOST_SUNK": 1 << 18}, ()),
        (channel, {"MAX_WAITING": 4096}, ()),
        (sse, {"MAX_EVENT_BYTES": 16 * MIB}, ()),
        (manifest, {"MAX_BYTES": 64 * MIB, "MAX_MANIFESTS": 1000}, ("64 MiB a manifest", "1,000 model folders")),
        (
            matcher,
            {
                "MAX_ITEMS_IN_ROW": 1000, "MAX_ITEMS_IN_ROW_OF_RULES": 500, "STEP_MAX_ITEMS": 20_000,
                "STEP_LEXER_FUEL": 100_000, "FIRST_LEXER_FUEL": 1_000_000, "MAX_LEXER_STATES": 20_000,
                "MAX_GRAMMAR_SIZE": 200_000,
            },
            (),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_fixed_limits_are_those_that_are_documented(module: object, values: dict[str, int], said: tuple[str, ...]):
    assert {name: getattr(module, name) for name in values} == values
    assert [words for words in said if words not in LIMITS_PAGE] == []
