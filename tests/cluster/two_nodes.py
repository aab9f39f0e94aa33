"""Two ``penstock node`` of one fleet file, a and b, with keys of their own and a gateway each, on the loopback.

``NodePair`` is both as one service: what its gateways know, its processes, and both addresses for clients.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from node_folder import NodeFolder

from .server import MOST_OUT_S, PATIENCE_S, PenstockNode, free_port

SPLIT = (("prefill", 1), ("decode", 1))
AGGREGATED = (("both", 1),)
Workers = Sequence[tuple[str, int]]
"""Role and number."""

FLEET = """
name = "two nodes"
keys = "{keys}"

[settings]
limits = {{ metrics_cache_s = 0.0 }}
{settings}
"""

NODE = """
[[nodes]]
name = "{name}"
address = "127.0.0.1"
gateways = 1
http_port = {http}
port = {port}
workers = [{workers}]
settings = {{ {settings} }}
"""

GROUP = """
[[groups]]
nodes = [{nodes}]
group = "{group}"
"""

PORTS_A_WORKER = 2


def free_ports(count: int) -> int:
    """The first of so many ports in a row that were free a moment ago."""
    while True:
        first = free_port()
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
        return first


class NodePair:
    """Both nodes.  Use: ``with two_nodes(folder) as pair:``."""

    def __init__(self, a: PenstockNode, b: PenstockNode) -> None:
        self.a = a
        self.b = b

    @property
    def nodes(self) -> tuple[PenstockNode, PenstockNode]:
        """a, b."""
        return self.a, self.b

    @property
    def urls(self) -> tuple[str, str]:
        """Of both gateways."""
        return self.a.url, self.b.url

    def workers(self) -> list[dict[str, Any]]:
        """All of them, as the first gateway that answers knows them."""
        try:
            return self.a.workers()
        except httpx.TransportError:
            return self.b.workers()

    def gateway_pids(self, workers: list[dict[str, Any]]) -> set[int]:
        """Of both; ``workers`` are the rows of all workers."""
        return self.a.gateway_pids(workers) | self.b.gateway_pids(workers)

    def read_log(self) -> str:
        """What both have written."""
        return "\n".join(f"node {node.name}:\n{node.read_log()}" for node in self.nodes)

    def wait_all_ready(self, timeout_s: float = MOST_OUT_S) -> None:
        """Until each gateway knows all workers as ready."""
        for node in self.nodes:
            node.wait_all_ready(timeout_s)

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Until both gateways know that no worker has anything to do or holds a page."""
        for node in self.nodes:
            node.wait_idle(timeout_s)

    def counted(self, name: str) -> float:
        """A counter of gateways, of both together."""
        return sum(node.metrics().get(f"penstock:{name}", 0.0) for node in self.nodes)

    def assert_nothing_leaked(self) -> None:
        """Idle, and each page has its owner."""
        self.wait_idle()
        for node in self.nodes:
            assert all(row["kv_pages_leaked"] == 0 for row in node.workers())


def write_nodes(
    folder: Path, workers: Mapping[str, Workers], settings: str, of_node: Mapping[str, str], group: str = ""
) -> tuple[Path, dict[str, int]]:
    """The fleet file, and the ports of the gateways."""
    keys = NodeFolder(folder, **dict.fromkeys(workers, "gateway,worker,operator"))
    counts = {name: sum(count for _, count in groups) for name, groups in workers.items()}
    if group:
        counts[next(iter(workers))] += 1  # gateways reach it at the first of its nodes
    ports = itertools.accumulate(counts.values(), lambda port, count: port + PORTS_A_WORKER * count,
                                 initial=free_ports(PORTS_A_WORKER * sum(counts.values())))  # fmt: skip
    http = {name: free_port() for name in workers}
    parts = [FLEET.format(keys=keys.host(""), settings=settings)]
    for (name, groups), port in zip(workers.items(), ports, strict=False):
        listed = ", ".join(f'{{ role = "{role}", count = {count} }}' for role, count in groups)
        own = of_node.get(name, "")
        parts.append(NODE.format(name=name, http=http[name], port=port, workers=listed, settings=own))
    if group:
        parts.append(GROUP.format(nodes=", ".join(f'"{name}"' for name in workers), group=group))
    file = folder / "fleet.toml"
    file.write_text("".join(parts))
    return file, http


@contextmanager
def two_nodes(
    folder: Path,
    *,
    workers: Workers | Mapping[str, Workers] = SPLIT,
    group: str = "",
    settings: str = 'kv_memory = "64MiB"',
    of_node: Mapping[str, str] | None = None,
    launchers: Mapping[str, Sequence[str]] | None = None,
    environs: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[NodePair]:
    """Both, ready.  At the end they must end with 0 and leave nothing.

    ``group``: how the ranks of one more worker, which is on both nodes, divide the model, as "pp2"; empty: none.
    ``settings``: TOML of [settings]; ``of_node``: settings of a node, as members of an inline table; ``launchers`` and
    ``environs``: words before a node's command, and its environment.
    """
    of_nodes = workers if isinstance(workers, Mapping) else dict.fromkeys("ab", workers)
    file, http = write_nodes(folder, of_nodes, settings, of_node or {}, group)
    number = sum(count for own in of_nodes.values() for _, count in own) + bool(group)
    with ExitStack() as stack:
        pair = NodePair(
            *(PenstockNode(file, name, http[name], environ=(environs or {}).get(name)) for name in of_nodes)
        )
        for node in pair.nodes:  # side by side: each waits for the other's workers
            node.launcher = list((launchers or {}).get(node.name, ()))
            node.start()
            stack.push(node.__exit__)
        for node in pair.nodes:
            node.wait_ready()
            node.wait_for(lambda node=node: len(node.workers()) == number, PATIENCE_S, "whole")  # type: ignore[misc]
            node.wait_all_ready()
        yield pair
