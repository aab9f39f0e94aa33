"""Which workers are homes: those that are ready and were heard of, and others on another host than theirs."""

from __future__ import annotations

from hashlib import blake2b

from router_words import IDENTITY, report

from penstock.clock import VirtualClock
from penstock.router.fleet import Fleet
from penstock.router.home_calls import WorkerHomes, host_of
from penstock.router.links import WorkerLinks
from penstock.router.rate_shares import REPORT_VALID_S
from penstock.types import Role, WorkerId
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import WorkerUp

DIGESTS = [blake2b(bytes([number]), digest_size=16).digest() for number in range(40)]


class _World:
    """Ready workers at addresses of hosts, and the homes among them."""

    def __init__(self) -> None:
        self.hub, self.clock, self.fleet = InMemoryHub(), VirtualClock(), Fleet()
        self.links = WorkerLinks(self.hub.connect_async, lambda *_: None)
        self.homes = WorkerHomes(self.fleet, self.links, self.clock)

    def join(self, name: str, endpoint: str, incarnation: int = 1) -> None:
        worker = WorkerId(name)
        up = WorkerUp(worker=worker, incarnation=incarnation, role=Role.BOTH, pid=1, endpoint=endpoint)
        assert self.fleet.on_worker_up(up, self.clock.now())
        self.hub.listen(f"memory://{name}-{incarnation}")
        self.links.open(worker, incarnation, f"memory://{name}-{incarnation}")
        self.hear(name, incarnation)

    def hear(self, name: str, incarnation: int = 1) -> None:
        assert self.fleet.on_report(report(name, incarnation=incarnation), self.clock.now())

    def homes_of_all(self) -> set[str]:
        return {link.worker for digest in DIGESTS if (link := self.homes.link(digest)) is not None}

    def hosts_of(self, digest: bytes) -> list[str]:
        slots = [self.fleet.slot(link.worker) for link in self.homes.possible_links(digest)]
        return [host_of(self.fleet.endpoints[slot]) for slot in slots if slot is not None]


async def test_who_is_silent_or_did_not_answer_is_no_home_until_it_says_something():
    world = _World()
    for number in range(3):
        world.join(f"both-{number}", f"tcp://10.0.0.{number}:1")
    assert world.homes_of_all() == {"both-0", "both-1", "both-2"}
    world.clock.advance(REPORT_VALID_S / 2)
    world.hear("both-0")
    world.hear("both-1")
    world.clock.advance(REPORT_VALID_S / 2)
    assert world.homes_of_all() == {"both-0", "both-1"}, "the third is silent"
    world.homes.on_unanswered(WorkerId("both-1"))
    assert world.homes_of_all() == {"both-0"}
    world.clock.advance(0.1)
    world.hear("both-1")
    world.hear("both-2")
    assert world.homes_of_all() == {"both-0", "both-1", "both-2"}
    await world.links.close()


async def test_tokens_may_be_at_the_home_and_on_one_other_host():
    world = _World()
    world.join("both-0", "tcp://10.0.0.1:1")
    world.join("both-1", "tcp://10.0.0.1:2")
    assert all(len(world.hosts_of(digest)) == 1 for digest in DIGESTS), "there is no other host"
    world.join("both-2", "tcp://10.0.0.2:1")
    assert all(sorted(world.hosts_of(digest)) == ["10.0.0.1", "10.0.0.2"] for digest in DIGESTS)
    world.join("both-2", "tcp://10.0.0.1:3", incarnation=2)
    assert all(world.hosts_of(digest) == ["10.0.0.1"] for digest in DIGESTS), "it has come back on the first"
    await world.links.close()


async def test_workers_of_the_gateways_own_host_are_not_elsewhere():
    world = _World()
    world.join("both-0", "tcp://10.0.0.1:1")
    world.join("both-1", "tcp://10.0.0.2:1")
    assert [worker for worker, _ in world.homes.elsewhere().workers] == ["both-0", "both-1"]
    world.homes.add_local(WorkerId("both-0"))
    assert [worker for worker, _ in world.homes.elsewhere().workers] == ["both-1"]
    world.homes.add_local(WorkerId("both-1"))
    assert [worker for worker, _ in world.homes.elsewhere().workers] == ["both-0", "both-1"], "none is elsewhere"
    assert world.fleet.identities() == (IDENTITY,)
    await world.links.close()
