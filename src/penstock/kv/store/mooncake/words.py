"""What a worker and its process for Mooncake say to each other over a lane, one question and one answer at a time.

A lane is a socket that keeps messages apart, and memory of one value that both have mapped.
"""

from __future__ import annotations

import msgspec

QUESTION_BYTES = 128 << 10
"""The longest question: whether some hundred keys are there."""

ANSWER_BYTES = 8 << 10

ASKED_AT_ONCE = 256
"""Keys in one question."""

NO_ROOM = -200
TOO_LONG = -600
NOT_READY = -703
NOT_THERE = -704
THERE_ALREADY = -705
"""Of Mooncake's codes those that mean something else than that it failed.
https://github.com/kvcache-ai/Mooncake/blob/main/mooncake-store/include/types.h"""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the process begins with."""

    master: str  # HOST:PORT
    metadata: str  # where Mooncake's clients find each other
    protocol: str
    devices: str
    segment_bytes: int  # that it gives to all; 0: none
    value_bytes: int  # the memory of a lane
    timeout_s: float  # of one word with the master
    lanes: tuple[tuple[int, int], ...]  # descriptors: socket, memory


class Has(msgspec.Struct, frozen=True, tag="has"):
    """Which of these are there?"""

    keys: list[str]


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Put this value into the lane's memory."""

    key: str


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Keep what stands in the lane's memory."""

    key: str


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Forget this value, whoever reads it."""

    key: str


Question = Has | Get | Put | Remove


class Answer(msgspec.Struct, frozen=True):
    """``code``: 0, the bytes of a value, or one of Mooncake's codes, which are negative.

    The first one says whether the client has come up."""

    code: int
    found: list[bool] = []
