"""What every test gets: stack traces of hangs and crashes, ``--long`` and its shards, and no way off the loopback.

The watchdog of each test is pytest-timeout (``timeout`` in pyproject.toml).
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from penstock.bundled import storyteller
from penstock.weights.compression_convert import decompress_folder
from sharding import in_turn, parse_shard

LONG_S = 900
"""The watchdog of a long test that has none of its own: a busy machine must not make it fail."""

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that run tests side by side, a core each
BEGUN = time.monotonic()
GPU = shutil.which("nvidia-smi") is not None and Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, whoever does that first
TIME_WAS_UP = "NOT RUN, its time was up"


for _signal, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # as of what runs in the background; tests send these
        signal.signal(_signal, _default)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what the default tier leaves out")
    parser.addoption("--families", action="store_true", help="also run the kernel tests of all families and types")
    parser.addoption("--within", type=float, metavar="SECONDS", help="skip what has not begun by then, and say so")
    parser.addoption("--shard", type=parse_shard, metavar="INDEX/COUNT", help="of what is selected only this part")
    parser.addoption(
        "--left", type=Path, metavar="FILE", help="names of tests that --within skipped: these run first; rewritten"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A busy machine makes any example slow; what must be quick has a test of its own.

    In CI the same commit has the same examples.  ``--hypothesis-seed``, the number of commits, makes the long tests'
    others with each one.
    """
    derandomize = "CI" in os.environ and config.getoption("--hypothesis-seed", None) is None
    settings.register_profile(
        "penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=derandomize
    )
    settings.load_profile("penstock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not GPU:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
    long = {item for item in items if item.get_closest_marker("long")}
    left_out = long
    if config.getoption("--long"):
        left_out = set[pytest.Item]()
    elif config.getoption("--families"):
        left_out = {item for item in long if not item.get_closest_marker("family")}
    for item in long - left_out:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_S))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    shard = config.getoption("--shard")
    if shard is not None:
        left = read_left(config)
        chosen = [items[place] for place in in_turn([item.nodeid for item in items], shard, left)]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Collections in tests pass over what was imported: a millisecond each instead of half a second."""
    gc.collect()
    gc.freeze()


def read_left(config: pytest.Config) -> set[str]:
    path = config.getoption("--left")
    return set(path.read_text().splitlines()) if path is not None and path.exists() else set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - BEGUN > within:
        pytest.skip(f"{TIME_WAS_UP}: {item.location[0]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What found no time is written down, where the reports of all processes come together."""
    path = session.config.getoption("--left")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path is None or reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = reporter.stats.get("skipped", [])
    left = [report.nodeid for report in skipped if TIME_WAS_UP in str(report.longrepr)]
    path.write_text("".join(f"{nodeid}\n" for nodeid in left))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was skipped is said aloud, each reason once: a GPU, a program or a file that this machine lacks."""
    for reason, tests in sorted(reasons_not_run(terminalreporter.stats.get("skipped", [])).items()):
        terminalreporter.write_line(f"{reason} ({tests} tests)" if tests > 1 else reason, yellow=True)


def reasons_not_run(skipped: list[Any]) -> Counter[str]:
    """Why tests were skipped, and how many each time.  Also of tests that ran in processes of their own (xdist)."""
    reasons = (report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple))
    plain = (reason.removeprefix("Skipped: ").removeprefix("NOT RUN").lstrip(":, ") for reason in reasons)
    return Counter(f"NOT RUN, {reason}" for reason in plain)


LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")
NAMESPACES = ("10.77.",)
"""Of this machine, with their links (``bench.faults.hosts``)."""


def refuse_other_hosts(connect: Any) -> Any:
    """Wrap ``socket.connect`` so that an address off the loopback is an error at once, not a time-out."""

    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(LOOPBACK + NAMESPACES):
            raise PermissionError(f"tests stay on the loopback, not {address[0]}")
        return connect(self, address)

    return guarded


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that is served in a test is remembered in the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", refuse_other_hosts(socket.socket.connect))
    patch.setattr(socket.socket, "connect_ex", refuse_other_hosts(socket.socket.connect_ex))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def plain_storyteller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which is shipped compressed, as other programs read it."""
    folder = tmp_path_factory.mktemp("plain") / "storyteller"
    decompress_folder(storyteller(), folder, report=lambda _: None)
    return folder
