"""The process that asks Ray for a gateway or a picker: ``python -m penstock.launch.members.ray_process QUESTION``.

It writes a line each time it has asked, and ends with the gateway.  An actor that does not answer, such as one that Ray
is starting again, keeps the members that it told last: only actors that are gone take theirs along.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time

import msgspec

from penstock import sidecar
from penstock.errors import PenstockError
from penstock.launch.members.interface import Member, MemberKind
from penstock.launch.members.ray import RayAnswer, RayQuestion
from penstock.launch.ray_cluster import RayCluster, connected

PROBLEM_CHARS = 500


def answer_forever() -> None:
    """Until the gateway has gone or Ray's client ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway
    sidecar.end_with_parent()
    logging.disable(logging.CRITICAL)
    question = msgspec.json.decode(sys.argv[1], type=RayQuestion)
    lane = socket.socket(fileno=question.descriptor)
    try:
        with connected(question.address) as cluster:
            _answer(lane, cluster, question)
    except PenstockError as error:
        _send(lane, RayAnswer(problem=str(error)))
    except Exception as error:  # noqa: BLE001 - whatever Ray raises, the gateway tells it
        _send(lane, RayAnswer(problem=f"{type(error).__name__}: {error}"[:PROBLEM_CHARS]))


def _answer(lane: socket.socket, cluster: RayCluster, question: RayQuestion) -> None:
    """Raises PenstockError when Ray does not answer."""
    known: dict[str, tuple[Member, ...]] = {}
    while True:
        actors = cluster.actors(question.fleet)
        for node, report in cluster.reports(list(actors.values())).items():
            if report is not None:
                known[node] = report.gateways if question.wanted is MemberKind.GATEWAYS else report.members
        known = {node: known[node] for node in sorted(actors.keys() & known.keys())}
        members = tuple(member for members in known.values() for member in members)
        _send(lane, RayAnswer(members=members, silent=tuple(sorted(actors.keys() - known.keys()))))
        time.sleep(question.poll_s)


def _send(lane: socket.socket, answer: RayAnswer) -> None:
    try:
        lane.sendall(msgspec.json.encode(answer) + b"\n")
    except OSError:  # the gateway has gone
        sys.exit()


if __name__ == "__main__":
    answer_forever()
