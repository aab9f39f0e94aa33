"""Limits that nobody can set: each is what it was chosen to be, and what docs/limits.md says.

Most tests of them work with smaller ones, so none of those sees a product's limit that grows a thousand times.
"""

from __future__ import annotations

from pathlib import Path

from penstock.cli.launch import AGENT_STOP_S
from penstock.cli.local_service import STOP_S
from penstock.config.node_registry import MAX_NODE_KEYS, MAX_REGISTERED_NODES
from penstock.engine.service.gateways import MAX_GATEWAYS, MAX_LOGPROBS_PER_MESSAGE
from penstock.engine.service.kv_events import MAX_DEMOTED
from penstock.grammar.matcher import (
    FIRST_LEXER_FUEL,
    MAX_GRAMMAR_SIZE,
    MAX_ITEMS_IN_ROW,
    MAX_ITEMS_IN_ROW_OF_RULES,
    MAX_LEXER_STATES,
    STEP_LEXER_FUEL,
    STEP_MAX_ITEMS,
)
from penstock.http_client import MAX_EVENT_BYTES
from penstock.kv.transfer.sender import ANNOUNCED_BYTES, FIRST_ANNOUNCED_BYTES, MAX_WAITING_PULLS
from penstock.launch.channel import MAX_WAITING
from penstock.launch.hub_download import MAX_FRUITLESS_RETRIES, SPARE_BYTES
from penstock.weights.manifest import MAX_BYTES, MAX_MANIFESTS
from penstock.wire.codec import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES
from penstock.wire.zeromq import QUEUE_MESSAGES, RECEIVED_MESSAGES

KIB, MIB = 1 << 10, 1 << 20


def test_fixed_limits_are_those_that_are_documented():
    page = " ".join((Path(__file__).resolve().parents[2] / "docs/limits.md").read_text().split())
    documented = {
        "32 MiB a message": (MAX_FRAME_BYTES, 32 * MIB),
        "64 MiB a payload": (MAX_PAYLOAD_BYTES, 64 * MIB),
        "8,192 log-probabilities": (MAX_LOGPROBS_PER_MESSAGE, 8192),
        "16,384 messages": (QUEUE_MESSAGES, 16_384),
        "1,024 received messages": (RECEIVED_MESSAGES, 1024),
        "remembers 4,096 gateways": (MAX_GATEWAYS, 4096),
        "4,096 nodes, 2 keys a node": ((MAX_REGISTERED_NODES, MAX_NODE_KEYS), (4096, 2)),
        "64 MiB a manifest": (MAX_BYTES, 64 * MIB),
        "the 1,000 most recently loaded": (MAX_MANIFESTS, 1000),
        "gives up a download | 6": (MAX_FRUITLESS_RETRIES, 5),
        "a download leaves free | 64 MiB": (SPARE_BYTES, 64 * MIB),
        "before it is killed | 40 s": (STOP_S, 40.0),
        "before it is killed | 10 s": (AGENT_STOP_S, 10.0),
    }
    assert {words for words, (is_, should_be) in documented.items() if words not in page or is_ != should_be} == set()


def test_fixed_limits_that_only_their_modules_name():
    assert (FIRST_ANNOUNCED_BYTES, ANNOUNCED_BYTES, MAX_WAITING_PULLS) == (512 * KIB, 8 * MIB, 4096)
    assert (MAX_WAITING, MAX_EVENT_BYTES, MAX_DEMOTED) == (4096, 16 * MIB, 256 * KIB)
    assert (MAX_ITEMS_IN_ROW, MAX_ITEMS_IN_ROW_OF_RULES, MAX_GRAMMAR_SIZE) == (1000, 500, 200_000)
    assert (STEP_MAX_ITEMS, STEP_LEXER_FUEL, FIRST_LEXER_FUEL, MAX_LEXER_STATES) == (20_000, 100_000, 1_000_000, 20_000)
