"""What ``penstock manifests`` prints, run in namespaces: the commands of pods, units and containers, with their probes,
signals, files, users and grace periods.  No cluster, no systemd and no container runtime take part.

``python -m bench.manifests`` prints how long they take to end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from .asking import penstock
from .containers import NETWORK, USER
from .manifest_processes import (
    STREAMS,
    NodesOf,
    Pod,
    cluster,
    drain,
    place,
    printed,
    services,
    started,
    templates,
    units,
    wait_for,
    whole_answer,
)
from .processes import children


@pytest.fixture(scope="module")
def wanted() -> str:
    return whole_answer()


# --- pods -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_decode_pod_that_is_deleted_loses_nothing(tmp_path: Path, wanted: str) -> None:
    with cluster(tmp_path) as pods:
        front = pods.gateway.front()
        wait_for(lambda: len(front.workers()) == 3, "joined by all")
        assert [pod.probe("livenessProbe") for pod in pods.pods] == [None] * 4
        assert front.get("/v1/models", Host="x").status_code == 401, "clients need the key of the Secret"
        drained = drain(front, STREAMS, lambda: pods.busy(front))
        assert (drained.code, drained.texts) == (0, [wanted] * STREAMS)
        wait_for(lambda: front.counted("answers_joined_total") > 0, "moved to the other pod")


@pytest.mark.long
def test_a_new_pod_is_used_and_a_gateway_finishes_its_streams(tmp_path: Path, wanted: str) -> None:
    with cluster(tmp_path) as pods:
        front = pods.gateway.front()
        assert pods.decode[0].end() == 0
        template = templates(pods.documents)["two-hosts-decode"]
        new = Pod(pods.there, pods.documents, template, "two-hosts-decode-new", 40)
        new.wait_ready()
        wait_for(lambda: front.workers().get("two-hosts-decode-new", {}).get("state") == "ready", "used")
        assert front.ask() == wanted
        drained = drain(front, 1, lambda: pods.gateway)
        assert (drained.code, drained.texts) == (0, [wanted]), "what runs is finished in the grace period"


@pytest.mark.long
def test_a_pod_that_answers_nothing_fails_its_probes(tmp_path: Path) -> None:
    with place(tmp_path) as there:
        documents = list(yaml.safe_load_all(printed("kubernetes", there)))
        pod = Pod(there, documents, templates(documents)["two-hosts-decode"], "two-hosts-decode-x", 22)
        pod.wait_ready()
        assert pod.probe("livenessProbe") is None
        stopped = [pod.running.process.pid, *children(pod.running.process.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for which in ("livenessProbe", "readinessProbe"):
            assert "no answer within 5 s" in (pod.probe(which) or "")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: pod.probe("livenessProbe") is None, "alive again")
        assert pod.end() == 0


@pytest.mark.long
def test_a_group_of_pods_is_one_worker(tmp_path: Path, wanted: str) -> None:
    with place(tmp_path, '{ role = "both", count = 1, group = "pp2" }') as there:
        documents = list(yaml.safe_load_all(printed("kubernetes", there)))
        (group,) = [one["spec"]["leaderWorkerTemplate"] for one in documents if one["kind"] == "LeaderWorkerSet"]
        # A LeaderWorkerSet of this size tells its pods of the leader and of their number.
        told = {"LWS_LEADER_ADDRESS": f"{NETWORK}.22"}
        leader = Pod(there, documents, group["leaderTemplate"], "two-hosts-both-0", 22, **told, LWS_WORKER_INDEX="0")
        follower = Pod(
            there, documents, group["workerTemplate"], "two-hosts-both-0-1", 23, **told, LWS_WORKER_INDEX="1"
        )
        gateway = Pod(there, documents, templates(documents)["two-hosts-gateway"], "two-hosts-gateway-g", 20)
        for pod in (leader, gateway):
            pod.wait_ready()
        front = gateway.front()
        wait_for(lambda: list(front.workers()) == ["two-hosts-both-0"], "joined")
        assert front.ask() == wanted
        assert leader.end() == 0
        assert follower.running.terminate(leader.spec["terminationGracePeriodSeconds"]) == 0


# --- units and containers of nodes ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("nodes_of", [units, services], ids=["systemd", "compose"])
def test_nodes_serve_drain_and_come_back(nodes_of: NodesOf, tmp_path: Path, wanted: str) -> None:
    with place(tmp_path) as there:
        nodes = started(there, nodes_of)
        assert nodes.front.ask() == wanted
        drained = nodes.drain("b")
        assert (drained.code, drained.texts) == (0, [wanted] * STREAMS)
        nodes.start_again("b")
        drained = nodes.drain("a", 1)
        assert (drained.code, drained.texts) == (0, [wanted]), "what runs is finished in the grace period"
        assert nodes.nodes["b"].end() == 0


class KeysOfContainers:
    """A file of API keys that the user of containers owns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self._draft = folder.parent / "draft.json"

    def change(self, *words: str) -> str:
        """`penstock keys` as that user; what it prints."""
        run = penstock("keys", words[0], str(self._draft), *words[1:])
        assert run.returncode == 0, run.stderr
        new = shutil.copy2(self._draft, self.path.with_suffix(".new"))
        if os.geteuid() == 0:
            os.chown(new, USER, USER)
        new.replace(self.path)
        return run.stdout


@pytest.mark.long
def test_a_container_writes_where_settings_say_and_refuses_a_key_once_it_is_revoked(tmp_path: Path) -> None:
    with place(tmp_path) as there:
        audit, keys = there.folder("log") / "audit.jsonl", KeysOfContainers(there.folder("clients"))
        key, about, *_ = keys.change("add", "--tenant", "me").splitlines()
        own = f'[settings]\napi_keys = "{keys.path}"\naudit_log = "{audit}"'
        there.fleet.write_text(there.fleet.read_text().replace("[settings]", own))
        nodes = dict(services(there))
        there.containers += [node.container for node in nodes.values()]
        for node in nodes.values():
            node.start()
        url = f"http://127.0.0.1:{there.host.relay(nodes['a'].container.address, 8000)}"
        wait_for(nodes["a"].is_healthy, "healthy")

        def status() -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{url}/v1/models", headers=headers, timeout=30, trust_env=False).status_code

        assert status() == 200
        keys.change("revoke", about.split()[0])
        wait_for(lambda: status() == 401, "revoked, without a restart")

        def audited() -> set[str]:
            return {json.loads(line)["event"] for line in audit.read_text().splitlines()}

        wait_for(lambda: {"keys_revoked", "refused"} <= audited(), "audited")  # by a thread, after the answer
