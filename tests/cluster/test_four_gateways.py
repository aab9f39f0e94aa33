"""Four services with a gateway each: what crashes workers, and what is counted, by all of them together.

``python -m bench.rates --only poison,metering`` prints the same as figures.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from .gateway_hosts import GATEWAYS, STRICT, TOKENS, Hosts, Meter, end_workers, text_of


@pytest.mark.long
def test_a_key_at_four_gateways_is_counted_once(tmp_path: Path) -> None:
    """One after the other, then at all at once."""
    with ExitStack() as stack:
        meter = Meter(Hosts(stack, tmp_path, services=GATEWAYS))
        one, all_at_once = meter.one_after_the_other(0), meter.at_once()
        alone = [meter.at_one(number) for number in range(GATEWAYS)]
        for each in (one, all_at_once, *alone):
            assert len(set(each.answers)) == 1, each
            assert (each.surplus, each.total("requests")) == ((0, 0), 1), each
        for each in (one, *alone):
            assert (each.total("generated"), each.total("prompts")) == (each.tokens, each.prompt), each
            assert each.total("replayed") == (len(each.answers) - 1) * TOKENS, each
        assert [each["completion"] for each in one.counted] == [TOKENS, 0, 0, 0]


@pytest.mark.long
def test_a_request_ends_two_workers_in_all_whichever_gateways_are_asked_for_it(tmp_path: Path) -> None:
    """With one worker none can die before the death of the one before it is known, so it is two exactly."""
    with ExitStack() as stack:
        hosts = Hosts(stack, tmp_path, config=STRICT, services=GATEWAYS, workers=1)
        ending = end_workers(hosts, 0)
        assert ending.verdicts == [(422, "poison_request")] * (1 + GATEWAYS)
        assert ending.ended == 2
        refused = [server.metrics()["penstock:poison_requests_total"] for server in hosts.servers]
        assert refused == [2, 1, 1, 1]
        (pid,) = {row["pid"] for server in hosts.servers for row in server.workers()}
        for number in range(GATEWAYS):
            text_of(hosts.ask(number, f"other-{number}"))
        assert {row["pid"] for server in hosts.servers for row in server.workers()} == {pid}
