"""Gateways of several hosts in front of one worker: each gets its part, whatever its host's clock says."""

from __future__ import annotations

from penstock.clock import VirtualClock
from penstock.config.schema import GatewayConfig
from penstock.router.service import RouterService
from penstock.types import RequestId, Role, SamplingParams, ValidRequest, WorkerId, pack_token_ids
from penstock.wire.supervisor_messages import WorkerUp

from .router_town import Town

DAY_S = 86_400.0


class Uptime:
    """The clock of a host that was started so long before ours."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def now(self) -> float:
        return self._clock.now() + self._seconds


async def test_gateways_on_hosts_with_other_uptimes_stand_in_one_line() -> None:
    """Twice as much is asked for as one worker can do, half of it by each of two gateways."""
    async with Town("both-0", max_running=4, max_queued=4096) as town:
        others: list[RouterService] = []
        for name, seconds in (("old", 30 * DAY_S), ("young", DAY_S)):
            clock = Uptime(town.clock, seconds)
            router = RouterService(
                GatewayConfig(name=name, model_name="null"),
                connect=town.stage.hub.connect_async,
                clock=clock,
                suspect=lambda _: None,
            )
            worker = town.worker("both-0")
            up = WorkerUp(worker=WorkerId("both-0"), incarnation=1, role=Role.BOTH, pid=1, endpoint=worker.endpoint)
            router.on_supervisor(up)
            others.append(router)
        for _ in range(3):
            await town.turn(0.3)
            for router in others:
                router.tick()
        streams = []
        for number in range(200):
            for router in others:
                request = ValidRequest(
                    id=RequestId(f"r{number}/{len(streams)}"),
                    prompt=pack_token_ids((number % 50, 2, 3)),
                    block_hashes=(),
                    sampling=SamplingParams(seed=number, max_tokens=16),
                    arrival=router._clock.now(),
                )
                streams.append(town.serve_by(router, request))
            for _ in range(2):
                await town.turn(0.01)
                for router in others:
                    router.tick()
        begun = [sum(bool(client.tokens) for client in streams[number::2]) for number in range(2)]
        assert sum(begun) < len(streams), "there is a line to stand in"
        assert max(begun) - min(begun) <= 8
        for router in others:
            await router.close()
