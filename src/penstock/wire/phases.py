"""What a worker measures of its part in one answer, for the answer's spans (``telemetry.spans.OF_WORKERS``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_FACTS = 16


Figure = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
Fact = Annotated[str, msgspec.Meta(max_length=64)]


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One phase of a leg.  Times count from the leg's arrival: clocks of two hosts are not compared."""

    name: Annotated[str, msgspec.Meta(max_length=32)]
    begin_s: Figure
    seconds: Figure
    facts: Annotated[dict[Fact, Figure], msgspec.Meta(max_length=MOST_FACTS)]
