"""A real DNS server of one name, over UDP in a thread of its own.  What it answers can be changed at any time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Literal

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Fault = Literal["nxdomain", "servfail", "silent"]


class NameServer:
    """Use as a context manager.  ``records``: the text of records of the name, of type ``kind``."""

    def __init__(self, name: str, kind: Literal["A", "SRV"], address: tuple[str, int]) -> None:
        self.records: Sequence[str] = ()
        self.fault: Fault | None = None
        self.asked = 0
        self._name, self._kind = name.lower().rstrip(".") + ".", kind
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.address = self._socket.getsockname()
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="name server")

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self.address)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._over:
            frame, client = self._socket.recvfrom(4096)
            with contextlib.suppress(dns.exception.DNSException):
                answer = self._answer(dns.message.from_wire(frame))
                if answer is not None:
                    self._socket.sendto(answer.to_wire(), client)

    def _answer(self, query: dns.message.Message) -> dns.message.Message | None:
        (question,) = query.question
        if self.fault == "silent":
            return None
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        ours = question.name.to_text().lower() == self._name
        if self.fault == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif self.fault == "nxdomain" or not ours:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif dns.rdatatype.to_text(question.rdtype) == self._kind and self.records:
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", self._kind, *self.records))
        self.asked += ours
        return answer
