"""How much one turn of a gateway's event loop may do, so that nobody's tokens wait for long behind others'.

Each limit is a number of things, never a time: what one of them costs does not grow with streams, workers or tokens.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.base import Config, Positive, Seconds


class TurnLimits(Config, frozen=True, kw_only=True):
    """Of one gateway process."""

    client_reads_per_turn: Positive = 4  # pieces of what clients send that are parsed, and so requests that begin
    answer_units_per_turn: Positive = 1024  # of tokens made text and written: 8 a write, 1 a token, 128 a new request
    message_units_per_turn: Positive = 384  # of messages from workers: 16 a message, 1 a request that has tokens in it
    flights_per_turn: Positive = 256  # requests that are looked at for silent workers and deadlines
    young_collection_objects: Positive = 500  # new objects that garbage is looked for among
    full_collection_streams: Annotated[int, msgspec.Meta(ge=0)] = 256  # open streams up to which all are searched
    full_collection_s: Seconds = 60.0  # at least, between two looks among all
    full_collection_bytes: Positive = 1 << 30  # that the process has grown by since then: it is done all the same
