"""Tenants' rates over the gateways of several hosts: shares, lent by the second, whatever the hosts' clocks say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.api.auth import Tenant
from penstock.api.load_shedding import TenantRateLimiter
from penstock.clock import VirtualClock
from penstock.config.schema import GatewayConfig
from penstock.errors import RateLimited
from penstock.launch.shared_rates import SharedTokenBuckets
from penstock.router.rate_shares import MIN_SHARE, share_of
from penstock.router.service import RouterService
from penstock.types import Role, WorkerId
from penstock.wire.gateway_messages import RateDemands, RateTotals
from penstock.wire.supervisor_messages import WorkerUp

from .router_town import Town
from .test_reports import CountedLink
from .test_several_gateways import DAY_S, Uptime

A_MINUTE = 600
ANN = Tenant(id="ann", requests_per_minute=A_MINUTE)
STEP_S = 0.1


class Host:
    """A supervisor with one gateway."""

    def __init__(
        self,
        town: Town,
        number: int,
        workers: Sequence[str] = ("both-0",),
        *,
        name: str = "",
        buckets: SharedTokenBuckets | None = None,
    ) -> None:
        """``name`` and ``buckets``: of a further gateway of this host, and of that host."""
        self.clock = Uptime(town.clock, number * DAY_S)
        self.buckets = buckets or SharedTokenBuckets(16, b"the same key file")
        self.rates = TenantRateLimiter(self.clock, self.buckets)
        self.received = 0
        self._town = town
        self.router = RouterService(
            GatewayConfig(name=name or f"host-{number}", model_name="null", rate_host=self.buckets.host),
            connect=self._connect,  # type: ignore[arg-type]
            clock=self.clock,
            suspect=lambda _: None,
            rates=self.buckets,
        )
        for name in workers:
            self.greet(name)

    def greet(self, name: str) -> None:
        endpoint = self._town.worker(name).endpoint
        self.router.on_supervisor(
            WorkerUp(worker=WorkerId(name), incarnation=1, role=Role.BOTH, pid=1, endpoint=endpoint)
        )

    def _connect(self, endpoint: str, *, worker: str = "") -> CountedLink:
        return CountedLink(self._town.stage.hub.connect_async(endpoint, worker=worker), self._count)

    def _count(self) -> None:
        self.received += 1

    def ask(self, tries: int, tenant: Tenant = ANN) -> int:
        """How many of so many requests are admitted."""
        admitted = 0
        for _ in range(tries):
            try:
                self.rates.charge(tenant, 1, 0)
            except RateLimited:
                continue
            admitted += 1
        return admitted

    def share(self, tenant: Tenant = ANN) -> float:
        """Of the tenant's rate; without demand."""
        with self.buckets.locked():
            return self.buckets.ask(tenant.id, "requests", A_MINUTE, 0, self.clock.now()).share


async def serve(
    town: Town, seconds: float, hosts: Sequence[Host], asking: Sequence[Host] = (), *, tries: int = 4
) -> int:
    """How many requests are admitted, of so many tries a step at each host that is ``asking``."""
    admitted = 0
    for _ in range(round(seconds / STEP_S)):
        await town.turn(STEP_S)
        for host in hosts:
            host.router.tick()
        admitted += sum(host.ask(tries) for host in asking)
    return admitted


async def close(hosts: Sequence[Host]) -> None:
    for host in hosts:
        await host.router.close()


async def test_a_rate_follows_demand_and_all_hosts_together_admit_no_more_than_one_would() -> None:
    async with Town("both-0") as town:
        hosts = [Host(town, number) for number in range(4)]
        await serve(town, 3.0, hosts)
        assert [host.share() for host in hosts] == [0.25] * 4
        await serve(town, 10.0, hosts, hosts[:1], tries=50)  # what was saved is spent
        assert hosts[0].share() == pytest.approx(1 - 3 / 4 * MIN_SHARE, abs=0.01)
        pace = A_MINUTE / 60
        one = await serve(town, 20.0, hosts, hosts[:1])
        assert 0.9 * 20 * pace <= one <= 20 * pace + 1
        moved = await serve(town, 20.0, hosts, hosts[1:2]) + await serve(town, 40.0, hosts, hosts)
        assert 0.9 * A_MINUTE <= moved <= 1.1 * A_MINUTE
        assert [host.share() for host in hosts] == pytest.approx([0.25] * 4, abs=0.05)
        await close(hosts)


async def test_what_a_host_that_is_gone_had_passes_to_the_others_and_one_that_joins_brings_no_full_bucket() -> None:
    async with Town("both-0") as town:
        hosts = [Host(town, number) for number in range(4)]
        await serve(town, 5.0, hosts, hosts, tries=50)
        left = hosts[:3]
        await serve(town, 8.0, left, left)
        assert sum(host.share() for host in left) == pytest.approx(1.0, abs=0.05)
        gone = await serve(town, 20.0, left, left)
        assert 0.9 * A_MINUTE / 3 <= gone <= 1.02 * A_MINUTE / 3
        await hosts[3].router.close()
        again = [*left, Host(town, 7)]
        async with asyncio.timeout(10):
            while not again[-1].router.ready():
                await town.turn(STEP_S)
        joined = await serve(town, 20.0, again, again, tries=50)
        assert joined <= 1.1 * A_MINUTE / 3 + MIN_SHARE * A_MINUTE / 4
        await close(again)


async def test_without_workers_each_host_keeps_an_equal_share_of_the_last_number_of_hosts() -> None:
    async with Town("both-0") as town:
        hosts = [Host(town, number) for number in range(2)]
        await serve(town, 10.0, hosts, hosts[:1])
        assert hosts[0].share() > 0.9
        town.stage.workers.clear()
        await serve(town, 10.0, hosts, hosts[:1])
        assert [host.share() for host in hosts] == [0.5, 0.5]
        assert await serve(town, 60.0, hosts, hosts[:1]) <= A_MINUTE / 2 + 1
        await close(hosts)


async def test_hosts_that_choose_different_workers_use_no_part_twice() -> None:
    async with Town("both-0", "both-1") as town:
        hosts = [Host(town, 0, ("both-0", "both-1")), Host(town, 1, ("both-1",))]
        await serve(town, 10.0, hosts, hosts)
        assert sum(host.share() for host in hosts) <= 1.0
        hosts[1].greet("both-0")
        await serve(town, 15.0, hosts, hosts[:1])
        assert hosts[0].share() > 0.8
        await close(hosts)


async def test_messages_of_an_exchange_are_one_a_second_and_none_for_a_host_that_is_alone() -> None:
    async with Town("both-0") as town:
        alone = Host(town, 0)
        await serve(town, 2.0, [alone], [alone])
        alone.received = 0
        await serve(town, 10.0, [alone], [alone])
        assert alone.share() == 1.0
        assert alone.received <= 10 * 2, "reports only"
        hosts = [alone, *(Host(town, number) for number in range(1, 16))]
        await serve(town, 3.0, hosts)
        for host in hosts:
            host.received = 0
        await serve(town, 10.0, hosts, hosts[:4])
        assert max(host.received for host in hosts) <= 10 * 3 + 2
        await close(hosts)


async def test_totals_that_nobody_asked_for_change_nothing() -> None:
    async with Town("both-0") as town:
        hosts = [Host(town, number) for number in range(2)]
        await serve(town, 15.0, hosts, hosts)
        before = [host.share() for host in hosts]
        hosts[0].router.on_message(WorkerId("both-0"), 1, RateTotals(hosts=1, sharing=1, totals={}))
        assert [host.share() for host in hosts] == before
        stranger = town.stage.hub.connect(town.worker("both-0").endpoint)
        stranger.send(RateDemands(demands=dict.fromkeys(hosts[0].buckets.busiest(9, hosts[0].clock.now()), 1e9)))
        await serve(town, 3.0, hosts, hosts)
        assert [host.share() for host in hosts] == pytest.approx(before, abs=0.05)
        await close(hosts)


@pytest.mark.parametrize(("sharing", "hosts"), [(1, 1), (3, 3), (2, 5), (0, 2)])
def test_shares_add_up_to_what_those_that_share_have(sharing: int, hosts: int) -> None:
    demands = [3.0, 1.0, 0.0][: max(1, sharing)]
    shares = [share_of(demand, sum(demands), sharing, hosts) for demand in demands]
    assert sum(shares) == pytest.approx(max(1, sharing) / hosts)
    assert min(shares) >= MIN_SHARE / hosts


def test_a_changed_share_changes_no_level() -> None:
    clock = VirtualClock(5.0)
    buckets = SharedTokenBuckets(4)
    rates = TenantRateLimiter(clock, buckets)
    rates.charge(ANN, A_MINUTE, 0)
    with buckets.locked():
        buckets.set_hosts(2, clock.now())
        (name,) = buckets.busiest(5, clock.now())
        buckets.set_shares({name: 0.1}, clock.now())
    clock.advance(30.0)
    with buckets.locked():
        buckets.set_shares({name: 0.9}, clock.now())
        assert buckets.ask("ann", "requests", A_MINUTE, 0, clock.now()).left == pytest.approx(0.1 * A_MINUTE / 2)
        buckets.expire_shares(clock.now() + 1.0, clock.now())
        assert buckets.ask("ann", "requests", A_MINUTE, 0, clock.now()) == (pytest.approx(0.05 * A_MINUTE), 0.5)
