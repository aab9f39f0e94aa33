"""How long tests wait for a service: a busy machine is given more time, and a broken service not for ever."""

from __future__ import annotations

import pytest

from cluster import server
from cluster.server import LOOKS_PER_S, MOST_TIMES, PenstockServer


class Clock:
    """Time passes by sleeping and looking only."""

    def __init__(self, look_s: float) -> None:
        self.now = 0.0
        self.look_s = look_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> bool:
        self.now += self.look_s
        return False


@pytest.mark.parametrize(
    ("look_s", "after_s"),
    [(0.0, 10.0), (1.5 / LOOKS_PER_S, 15.0), (5.0, MOST_TIMES * 10.0)],
    ids=["quiet machine", "busy machine", "looks that hang"],
)
def test_waiting_ends(look_s: float, after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(look_s)
    monkeypatch.setattr(server, "time", clock)
    with pytest.raises(AssertionError, match="not there within"):
        PenstockServer.wait_for(clock.look, 10.0, "there")
    assert after_s <= clock.now < 1.5 * after_s
