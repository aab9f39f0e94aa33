"""Nodes with keys of their own, as real processes: they serve as one, keys are rotated, revoked and stolen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from node_folder import NodeFolder
from penstock.types import (
    MAX_COUNT,
    MAX_INCARNATION,
    AudioInput,
    Duty,
    ModelIdentity,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    WorkerId,
    WorkerState,
    pack_token_ids,
)
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import AssignRole, Cancel, Hello, KvEvents, Recipient, Submit, WorkerReport
from penstock.wire.node_keys import NodeKeys
from penstock.wire.transfer_messages import EncodeImage, PullPages
from penstock.wire.transport import Link, Listener
from penstock.wire.zeromq import ZmqTransport

from .asking import Stream, ask, body, streaming
from .server import PATIENCE_S, PenstockNode, PenstockServer, PenstockWorker, free_port
from .test_nodes import GROUP, NODE, SPLIT, free_ports, ranks_of

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "64MiB"
audit_log = "{audit}"

[settings.failover]
no_path_s = 60.0
"""


@contextmanager
def two_nodes(
    folder: NodeFolder, tmp_path: Path, workers: str = SPLIT, groups: str = "", *, count: int = 4
) -> Iterator[tuple[PenstockNode, PenstockNode]]:
    """Nodes ``a`` and ``b``, each with a gateway, and a prefill worker and a decode worker unless others are asked for;
    ``count``: of both nodes and the groups."""
    http, ports, file = (free_port(), free_port()), free_ports(), tmp_path / "fleet.toml"
    nodes = [NODE.format(name=name, http=http[i], port=ports[i], workers=workers) for i, name in enumerate("ab")]
    head = FLEET.format(keys=folder.host(""), audit=tmp_path / "audit.jsonl")
    file.write_text("".join((head, *nodes, groups)))
    with ExitStack() as stack:
        a, b = PenstockNode(file, "a", http[0]), PenstockNode(file, "b", http[1])
        for node in (a, b):
            node.start()
            stack.callback(node.kill)
        for node in (a, b):
            node.wait_ready()
            node.wait_for(lambda node=node: len(node.workers()) == count, PATIENCE_S, "whole")
            node.wait_all_ready()
        yield a, b


def ready_workers(server: PenstockServer) -> set[str]:
    return {row["id"] for row in server.workers() if row["state"] == "ready"}


@pytest.mark.long
def test_a_worker_over_two_nodes_forms_anew_after_a_key_of_one_is_replaced(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, a="gateway,worker", b="gateway,worker")
    with two_nodes(folder, tmp_path, "", GROUP, count=1) as (a, b):
        wanted, before = ask(a, max_tokens=60), ranks_of(a)
        folder.run("rotate", "b")
        folder.deliver_registry()
        folder.deliver_secret("b")
        folder.run("rotate", "b", "--finish")
        folder.deliver_registry()
        b.kill()  # the other node, which began with the old keys, goes on
        a.wait_for(lambda: not ranks_of(a), PATIENCE_S, "alone")
        b.start()
        b.wait_ready()
        for node in (a, b):
            node.wait_for(lambda node=node: set(ranks_of(node)) == {0, 1}, PATIENCE_S, "whole again")
            assert set(ranks_of(node).values()).isdisjoint(before.values())
            assert ask(node, max_tokens=60) == wanted


@pytest.mark.long
def test_nodes_with_keys_of_their_own_serve_as_one_and_one_is_revoked_while_they_run(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, a="gateway,worker,operator", b="gateway,worker")
    with PenstockServer(["--aggregated"]) as server:
        undisturbed = ask(server, max_tokens=900)
    with two_nodes(folder, tmp_path) as (a, b):
        pids = {node: node.processes() for node in (a, b)}
        for node in (a, b):
            assert ask(node, max_tokens=900) == undisturbed
        refused = httpx.post(f"{b.url}/admin/workers/a-decode-0/drain", json={}, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "node_not_operator")

        with streaming(a, max_tokens=900) as stream:
            stream.read(50)
            folder.run("revoke", "b")
            folder.deliver_registry("a")  # whoever has the key of b does not take this one
            a.wait_for(lambda: ready_workers(a) == {"a-prefill-0", "a-decode-0"}, PATIENCE_S, "without b")
            assert stream.read() == undisturbed
        b.wait_for(lambda: ready_workers(b) == {"b-prefill-0", "b-decode-0"}, PATIENCE_S, "without a")
        assert ask(a, max_tokens=900) == undisturbed
        assert a.processes() == pids[a]
        a.wait_for(lambda: '"event":"nodes_revoked"' in (tmp_path / "audit.jsonl").read_text(), PATIENCE_S, "audited")
        assert '"reason":"revoked"' in (tmp_path / "audit.jsonl").read_text()
        assert "the node b is revoked" in a.read_log()
        a.wait_idle()
        assert all(row["kv_pages_leaked"] == 0 for row in a.workers() if row["id"].startswith("a-"))


@dataclass
class Joined:
    """A gateway of the node ``g`` and the workers of ``w`` and ``v`` that it joins; ``h`` may have gateways, too."""

    folder: NodeFolder
    server: PenstockServer
    workers: dict[str, PenstockWorker]
    free: str  # an endpoint at which the gateway looks for a worker, in vain
    audit: Path
    undisturbed: str = ""  # an answer

    def worker(self, node: str) -> str:
        """The name of its worker."""
        return f"{node}-both-{self.workers[node].port}"

    def process(self, node: str) -> PenstockServer:
        """Of the node."""
        return self.server if node == "g" else self.workers[node]

    def wait_logged(self, node: str, text: str, count: int = 1) -> None:
        """Until the log of the node's processes has the text so often."""
        server = self.process(node)
        server.wait_for(lambda: server.read_log().count(text) >= count, PATIENCE_S, text)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    path = tmp_path_factory.mktemp("joined")
    folder = NodeFolder(path, g="gateway,operator", h="gateway", w="worker", v="worker")
    audit, free = path / "audit.jsonl", f"tcp://127.0.0.1:{free_port()}"
    log = ["--audit-log", str(audit)]
    with ExitStack() as stack:
        workers = {node: PenstockWorker(["--keys", str(folder.host(node)), *log]) for node in "wv"}
        flags = ["--keys", str(folder.host("g")), *log, "--join", free]
        flags += [word for worker in workers.values() for word in ("--join", worker.endpoint)]
        for worker in workers.values():
            worker.start()
            stack.push(worker.__exit__)
        server = PenstockServer(flags, config="[failover]\nno_path_s = 60.0\n", folder=path)
        stack.enter_context(server)
        whole = Joined(folder, server, workers, free, audit)
        names = {whole.worker(node) for node in "wv"}
        server.wait_for(lambda: ready_workers(server) == names, PATIENCE_S, "joined")
        whole.undisturbed = ask(server, max_tokens=900)
        yield whole


def test_stolen_keys_do_what_their_node_may_and_no_more(joined: Joined, tmp_path: Path) -> None:
    """Thieves with the keys of a worker's and of a gateway's node try all that one message could do before."""
    server = joined.server
    with named_stream(server) as (request, stream), ExitStack() as stack:
        stream.read(50)
        worker = serving_worker(joined, request)
        endpoint = joined.workers[worker[0]].endpoint
        thieves = {node: NodeKeys.load(joined.folder.steal(node, tmp_path / node)) for node in "hv"}
        transports = {node: ZmqTransport(keys) for node, keys in thieves.items()}
        for transport in transports.values():
            stack.callback(transport.close)
        links = {node: transports[node].connect(endpoint, worker=worker) for node in "hv"}
        # What its own name allows is answered.
        assert links["h"].send(Hello(gateway="h-gateway-1", incarnation=1))
        report = next_message(transports["h"], links["h"])
        assert isinstance(report, WorkerReport)
        for node, attack in attacks(joined, request, report):
            assert links[node].send(attack)
        server.wait_for(lambda: set(REFUSED) <= refusals(joined), PATIENCE_S, "all are refused")
        answered = {node: {type(message) for message in messages(links[node])} for node in "hv"}
        assert answered["h"] <= {WorkerReport, KvEvents}, "no page, no ticket for one, no token"
        assert not answered["v"]
        mailbox = transports["v"].listen(joined.free)
        hello = next_message(transports["v"], mailbox)
        assert isinstance(hello, Hello)
        refused = 'peer_refusals_total{model_name="storyteller",reason="foreign_name"}'
        forged = server_report(WorkerId(joined.worker("w")), server)
        answer_until(transports["v"], mailbox, forged, lambda: counted(server, refused) > 0)
        assert stream.read() == joined.undisturbed
    assert ask(server, max_tokens=900) == joined.undisturbed
    assert {row["id"]: row["state"] for row in server.workers()} == dict.fromkeys(names_of(joined), "ready")
    assert ("v", "WorkerReport", "foreign_name") in refusals(joined)


REFUSED = (
    ("h", "Hello", "foreign_name"),
    ("h", "AssignRole", "no_right"),
    ("h", "PullPages", "no_right"),
    ("h", "EncodeImage", "no_right"),
    ("v", "Hello", "no_right"),
    ("v", "AssignRole", "no_right"),
    ("v", "Submit", "no_right"),
    ("v", "Cancel", "no_right"),
)
"""Of what the thieves send to a worker: whose key it is, the message, and why.  A gateway's key may cancel, but not the
request of another gateway: that Cancel is ignored, so the stream goes on."""


def attacks(joined: Joined, request: RequestId, report: WorkerReport) -> Iterator[tuple[str, PeerMessage]]:
    """Whose key, and what is sent with it to the worker that computes the request and says this of itself."""
    lock_out = Hello(gateway=gateway_name(joined), incarnation=MAX_INCARNATION, connection=1 << 40)
    drain, cancel = AssignRole(duty=Duty.DRAIN), Cancel(request=request, epoch=MAX_COUNT)
    yield "h", lock_out
    yield "h", drain
    yield "h", cancel
    pull = PullPages(
        request=request,
        epoch=1,
        skip_blocks=0,
        identity=report.identity,
        layout="storyteller",
        carrier="tcp",
        incarnation=report.incarnation,
    )
    yield "h", pull
    yield "h", EncodeImage(content=bytes(32), media=AudioInput(64, 2, bytes(8)), identity=report.identity)
    yield "v", lock_out
    yield "v", Hello(gateway="v-gateway-1", incarnation=1)
    yield "v", drain
    yield "v", cancel
    submit = Submit(
        recipient=Recipient(worker=report.worker, incarnation=report.incarnation, identity=report.identity),
        request=RequestId("stolen/0"),
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=bytes(pack_token_ids((1, 2, 3))),
        sampling=SamplingParams(seed=5, max_tokens=900),
        root=bytes(32),
    )
    yield "v", submit
    yield "v", msgspec.structs.replace(submit, request=request, epoch=MAX_COUNT)  # in place of a request that runs


@pytest.mark.parametrize("node", ["w", pytest.param("g", marks=pytest.mark.long)])
def test_keys_are_replaced_while_streams_run(joined: Joined, node: str) -> None:
    folder, server = joined.folder, joined.server
    others = [other for other in "gwv" if other != node]
    pids = {other: joined.process(other).processes() for other in "gwv"}
    told = f"the node {node} has other keys or rights now"
    with streaming(server, max_tokens=900) as stream:
        stream.read(50)
        folder.run("rotate", node)
        folder.deliver_registry()
        for other in others:
            joined.wait_logged(other, told)
        folder.deliver_secret(node)
        joined.wait_logged(node, f"the node {node} has another key now")
        assert stream.read() == joined.undisturbed
    with streaming(server, max_tokens=900) as stream:
        stream.read(50)
        folder.run("rotate", node, "--finish")
        folder.deliver_registry()
        for other in others:
            joined.wait_logged(other, told, 2)
        assert stream.read() == joined.undisturbed
    assert ask(server, max_tokens=900) == joined.undisturbed
    server.wait_for(lambda: ready_workers(server) == set(names_of(joined)), PATIENCE_S, "whole")
    assert {other: joined.process(other).processes() for other in "gwv"} == pids


def test_a_revoked_nodes_worker_is_used_no_more(joined: Joined) -> None:
    server = joined.server
    with streaming(server, max_tokens=900) as stream, streaming(server, max_tokens=900) as second:
        stream.read(50)
        joined.folder.run("revoke", "v")
        joined.folder.deliver_registry("g", "w")
        server.wait_for(lambda: ready_workers(server) == {joined.worker("w")}, PATIENCE_S, "without v")
        assert stream.read() == second.read() == joined.undisturbed
    assert joined.workers["v"].running
    assert ask(server, max_tokens=900) == joined.undisturbed


# --- helpers ---------------------------------------------------------------------------------------------------------


@contextmanager
def named_stream(server: PenstockServer) -> Iterator[tuple[RequestId, Stream]]:
    """A streamed answer, and what workers call its only choice."""
    with (
        httpx.Client(timeout=110, trust_env=False) as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=body(max_tokens=900, stream=True)) as response,
    ):
        assert response.status_code == 200
        yield RequestId(f"{response.headers['x-request-id']}/0"), Stream(response)


def serving_worker(joined: Joined, request: RequestId) -> WorkerId:
    """Where it is computed."""
    (choice,) = joined.server.get(f"/debug/requests/{request}").json()["choices"]
    return WorkerId(choice["decisions"][-1]["legs"][-1]["worker"])


def refusals(joined: Joined) -> set[tuple[str, ...]]:
    """Key, message and reason of each in the audit log."""
    pattern = '"event":"peer_refused","key":"([^"]*)","detail":"([^"]*)","reason":"([^"]*)"'
    return set(re.findall(pattern, joined.audit.read_text()))


def messages(link: Link) -> Iterator[PeerMessage]:
    """All that have come."""
    while (received := link.recv()) is not None:
        yield received.message


def names_of(joined: Joined) -> list[str]:
    return [joined.worker(node) for node in "wv"]


def gateway_name(joined: Joined) -> str:
    """As the gateway tells every worker: here from its audit log."""
    joined.server.get("/debug/requests")
    joined.server.wait_for(lambda: '"gateway":"' in joined.audit.read_text(), PATIENCE_S, "audited")
    name = re.search('"gateway":"([^"]+)"', joined.audit.read_text())
    assert name is not None
    return name[1]


def server_report(worker: WorkerId, server: PenstockServer) -> WorkerReport:
    """What another node's worker would say of itself, to take its place."""
    return WorkerReport(
        worker=worker,
        incarnation=MAX_INCARNATION,
        role=Role.BOTH,
        state=WorkerState.READY,
        pid=server.pid,
        identity=ModelIdentity(fingerprint="f", numerics="n"),
        max_model_len=2048,
    )


def next_message(transport: ZmqTransport, end: Listener | Link) -> PeerMessage:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (received := end.recv()) is not None:
            return received.message
        transport.wait(0.1, [end])
    raise AssertionError("nothing came")


def answer_until(
    transport: ZmqTransport, mailbox: Listener, report: WorkerReport, condition: Callable[[], bool]
) -> None:
    """Answer each Hello with this report."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        while (received := mailbox.recv()) is not None:
            mailbox.send(received.peer, report)
        transport.wait(0.1, [mailbox])


def counted(server: PenstockServer, series: str) -> float:
    found = re.search(rf"(?m)^penstock:{re.escape(series)} (\S+)$", server.get("/metrics").text)
    return 0.0 if found is None else float(found[1])
