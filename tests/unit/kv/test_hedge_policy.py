"""When waiting for pages is given up for computing them: a table."""

from __future__ import annotations

import pytest

from penstock.config.limits import KvTransferConfig
from penstock.kv.transfer.receiver import HedgePolicy, PendingPages
from penstock.types import RequestId

R = RequestId("r")


@pytest.mark.parametrize(
    ("elapsed", "missing", "compute_s", "sooner"),
    [
        (0.05, 10, 0.001, False),  # it has just begun
        (0.20, 10, 0.100, True),  # nothing has come in 0.2 s: 4 s at the least
        (0.20, 10, 4.000, False),  # computing takes as long
        (0.20, 2, 0.100, False),  # 8 of 10 came: the rest takes 0.05 s
        (0.20, 5, 0.100, True),  # 5 came in 0.2 s, 5 are missing, and computing them takes half of that
        (0.20, 5, 0.140, False),  # by less than the margin
        (5.00, 0, 0.000, False),  # all is here
        (5.00, 10, None, False),  # nobody can
    ],
)
def test_the_rest_takes_as_long_as_what_has_come(
    elapsed: float, missing: int, compute_s: float | None, sooner: bool
) -> None:
    asked: list[tuple[RequestId, int, int]] = []

    def predict(request: RequestId, start: int, stop: int) -> float | None:
        asked.append((request, start, stop))
        return compute_s

    policy, pending = HedgePolicy(KvTransferConfig(), predict), PendingPages(100.0, 10)
    recompute = policy.should_recompute(R, pending, 100.0 + elapsed, missing=missing, computed=32, total=200)
    assert recompute is sooner
    assert set(asked) <= {(R, 32, 200)}
