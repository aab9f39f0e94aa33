"""Law 1 with pages that NIXL brings, and what becomes of answers when its processes die: a whole service."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from .server import PenstockServer
from .streams import all_answers
from .varied import varied_requests

LOOPBACK = (
    '[hand_over]\nnixl_transports = "tcp"\nnixl_devices = "lo"\nfetch_stall_s = 1.0\n[routing]\nsplit = "always"\n'
)
AGENT = "kv.connectors.nixl.agent_process"


PLANS = ["--prefill-parallel", "pp2", "--decode-parallel", "tp2"]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("flags", [[], PLANS], ids=["one process each", "pp2 to tp2"])
def test_answers_are_the_same_with_nixl_and_when_its_processes_die(flags: list[str], tmp_path: Path):
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NOT RUN: no NIXL here: pip install --no-deps nixl-cu12")
    with PenstockServer(["--aggregated"]) as server:
        plain = asyncio.run(all_answers(server.url, varied_requests(salt="plain", salt_each=True), together=False))
    with PenstockServer(["--transfer", "nixl", *flags], config=LOOPBACK, folder=tmp_path) as server:

        def same(salt: str, *, together: bool) -> None:
            bodies = varied_requests(salt=salt, salt_each=True)
            answers = asyncio.run(all_answers(server.url, bodies, together=together))
            assert [each.identical for each in answers] == [each.identical for each in plain], salt

        salts = iter(range(10_000))

        def both_again() -> bool:
            """One that has failed is started for a request that comes after its rest."""
            bodies = varied_requests(salt=f"again {next(salts)}", salt_each=True)[-1:]
            asyncio.run(all_answers(server.url, bodies, together=False))
            return len(server.children_of_workers(AGENT)) == 2

        same("comes up", together=False)
        both = "a process that gives and one that takes"
        server.wait_for(lambda: len(server.children_of_workers(AGENT)) == 2, 60, both)
        same("up", together=False)
        same("together", together=True)
        for how in (signal.SIGSTOP, signal.SIGKILL):
            server.wait_for(both_again, 90, both)
            for pid in server.children_of_workers(AGENT):
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
            same(how.name, together=False)
        server.wait_idle()
        assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())
        assert "NIXL" in server.read_log()
