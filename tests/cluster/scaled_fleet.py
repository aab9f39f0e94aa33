"""Gateways 2 -> 4 -> 1 and workers 2 -> 6 -> 2 while clients ask, whichever source of members gateways follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.wire.curve_keys import CurveKeys

from .keyed_load import Identical, KeyedLoad, leave_one_gateway
from .member_sources import QUICK, Source
from .server import PATIENCE_S, PenstockServer, PenstockWorker

GATEWAYS, WORKERS, FEW = 4, 6, 2
PATIENT = "[failover]\nno_path_s = 120.0\n"

USED_S = 10.0
"""From a change of the members until the last of four gateways uses the last of four new workers, all on two cores that
other tests share.  ``bench.members`` measures it against its bar of 3 s."""


@dataclass(frozen=True)
class Scaling:
    """Workers that become more and fewer.  Each action returns when gateways can learn of it."""

    few: tuple[str, ...]
    many: tuple[str, ...]
    grow: Callable[[], object]
    shrink: Callable[[], object]
    end_others: Callable[[], object]
    """When no gateway knows them any more."""
    pids: Callable[[], Sequence[int]]
    """Processes that must not be started anew: of the workers that stay, or their node."""


@dataclass(frozen=True)
class Scaled:
    """What came of it."""

    load: KeyedLoad
    differing: int  # answers
    used_s: float  # from the end of ``grow`` until four gateways use the four new workers
    forgotten_s: float  # from the end of ``shrink`` until the gateway that is left knows two workers
    waited_s: float  # the longest time without a token, of any stream
    restarts: int  # of the gateway that is left and the processes that stay

    def assert_unharmed(self) -> None:
        """No request failed, all is as it was, and new workers were used soon."""
        assert self.load.failed == []
        assert self.differing == 0
        assert self.load.resumed > 0, "no stream was open when its gateway ended"
        assert self.restarts == 0
        assert self.used_s <= USED_S


def wait_uses(gateway: PenstockServer, workers: Sequence[str]) -> None:
    """Until a gateway has these workers, all ready, and no others."""
    wanted = dict.fromkeys(workers, "ready")
    gateway.wait_for(lambda: states(gateway) == wanted, 2 * PATIENCE_S, f"using {', '.join(workers)}")


def states(gateway: PenstockServer) -> dict[str, str]:
    """Of the workers that a gateway knows, by name."""
    return {row["id"]: row["state"] for row in gateway.workers()}


def scale(scaling: Scaling, gateways: Sequence[PenstockServer], wanted: Mapping[int, Identical]) -> Scaled:
    """``gateways``: four that do not run yet; of those one is stopped at last, and one killed amid a stream.

    ``wanted``: of each client's seed.
    """
    stays = gateways[0]
    with ExitStack() as stack:
        for gateway in gateways[:2]:
            stack.enter_context(gateway)
        for gateway in gateways[:2]:
            wait_uses(gateway, scaling.few)
        load = KeyedLoad([gateway.url for gateway in gateways[:2]], len(wanted), headers=stays.key_headers())
        with load.running():
            asked = time.monotonic()
            for gateway in gateways[2:]:
                stack.enter_context(gateway)
                load.urls.append(gateway.url)
            before = [stays.gateway_pid(), *scaling.pids()]
            scaling.grow()
            began = time.monotonic()
            for gateway in gateways:
                wait_uses(gateway, scaling.many)
            used_s = time.monotonic() - began
            stays.wait_for(lambda: stays.worker(scaling.many[-1])["running"] > 0, PATIENCE_S, "asked")

            leave_one_gateway(gateways, load)
            scaling.shrink()
            began = time.monotonic()
            wait_uses(stays, scaling.few)
            forgotten_s = time.monotonic() - began
            scaling.end_others()
            load.wait_answers(len(wanted), 2 * PATIENCE_S)
        after = [stays.gateway_pid(), *scaling.pids()]
        stays.wait_idle()
        assert all(row["kv_pages_leaked"] == 0 for row in stays.workers())
    restarts = sum(one != other for one, other in zip(before, after, strict=True))
    return Scaled(load, load.differing(wanted), used_s, forgotten_s, load.longest_wait_s(asked), restarts)


def scaled_by(source: Source, folder: Path, wanted: Mapping[int, Identical], settings: str = QUICK) -> Scaled:
    """``penstock worker`` six times, and gateways that follow this source; ``settings``: see ``member_sources``."""
    keys = folder / "keys"
    CurveKeys.ephemeral().save(keys)
    names = tuple(f"w{number}" for number in range(WORKERS))
    workers = [PenstockWorker(["--keys", str(keys), "--name", name, "--kv-memory", "64MiB"]) for name in names]
    stay, more = workers[:FEW], workers[FEW:]
    with ExitStack() as stack:
        members = stack.enter_context(source(folder, settings))
        for worker in stay:
            stack.enter_context(worker)
        members.publish(stay)

        def grow() -> None:
            for worker in more:  # side by side
                worker.start()
                stack.push(worker.__exit__)
            for worker in more:
                worker.wait_ready()
            members.publish(workers)

        scaling = Scaling(
            few=names[:FEW],
            many=names,
            grow=grow,
            shrink=lambda: members.publish(stay),
            end_others=lambda: [worker.stop() for worker in more],
            pids=lambda: [worker.worker_pid() for worker in stay],
        )
        flags, config = ["--keys", str(keys), "--members", members.name], PATIENT + members.config
        gateways = [PenstockServer(flags, config=config, folder=folder) for _ in range(GATEWAYS)]
        return scale(scaling, gateways, wanted)
