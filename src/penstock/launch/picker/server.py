"""``penstock picker``: the process that proxies ask which gateway gets a request.

::

    :9002  ExternalProcessor and Health, for proxies; with TLS if there is a certificate
    :9003  Health in clear, for probes of Kubernetes, which know no TLS
    :9090  /metrics

Any number of pickers may run: all have the same order of gateways for a key, so none leads.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server

from penstock.clock import MonotonicClock
from penstock.config.base import expanded_path, host_and_port
from penstock.config.schema import PickerConfig, TlsConfig
from penstock.errors import ConfigError
from penstock.launch import event_loop
from penstock.launch.members.interface import MemberKind
from penstock.launch.members.registry import open_members
from penstock.launch.picker import ext_proc
from penstock.launch.picker.live_gateways import LiveGateways
from penstock.launch.service_notify import READY, STOPPING, notify_service_manager
from penstock.launch.tls import TlsCertificate
from penstock.telemetry.log import configure_logging, log_event
from penstock.telemetry.registry import PickerMetrics

log = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
"""Services of grpc.health.v1 that the endpoint picker protocol names, besides that of ext_proc and the empty one."""

PROBE_THREADS = 4

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_WHEN_SETTLED = ("", READINESS, ext_proc.SERVICE)


def run_picker(config: PickerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises ConfigError for members or certificates that cannot be, and for ports that are taken.
    """
    configure_logging("picker", as_json=config.log_json)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    event_loop.run(_serve(config))
    return 0


async def _serve(config: PickerConfig) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    metrics, states = PickerMetrics(), health.HealthServicer()

    def changed() -> None:
        metrics.set_gateways(len(gateways.ranking.endpoints), gateways.member_count)

    members = open_members(config.members or "", config.membership, MonotonicClock(), MemberKind.GATEWAYS)
    gateways = LiveGateways(members, config.picker, https=config.https_gateways, on_change=changed)
    picker = ext_proc.EndpointPicker(lambda: gateways.ranking, config.picker, metrics)
    for service in _WHEN_SETTLED:
        states.set(service, _NOT_SERVING)
    states.set(LIVENESS, _SERVING)
    async with AsyncExitStack() as stack:
        places = await _listen(config, picker, states, metrics, stack)
        for work in (gateways.run(), _end_late_streams(picker, config.picker.first_message_s)):
            stack.callback(asyncio.create_task(work).cancel)
        settled = asyncio.create_task(gateways.settled.wait(), name="settled")
        stack.callback(settled.cancel)
        stopped = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait((settled, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.is_set():
            for service in _WHEN_SETTLED:
                states.set(service, _SERVING)
            ready = len(gateways.ranking.endpoints)
            log.info("ready: %d of %d gateways can serve; %s", ready, gateways.member_count, places)
            notify_service_manager(READY)
        await stopped
        log.info("stopping")
        notify_service_manager(STOPPING)
        states.enter_graceful_shutdown()


async def _end_late_streams(picker: ext_proc.EndpointPicker, every_s: float) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        picker.end_late_streams()


async def _listen(
    config: PickerConfig,
    picker: ext_proc.EndpointPicker,
    states: health.HealthServicer,
    metrics: PickerMetrics,
    stack: AsyncExitStack,
) -> str:
    """Start all servers, which end with ``stack``; returns where they listen, for the log.  Raises ConfigError."""
    host, port = host_and_port(config.listen)
    limits = config.picker
    options = (
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # bodies are returned as they came
        ("grpc.so_reuseport", 0),  # a port that is taken is an error
    )
    # gRPC's threads, not its asyncio: a request costs less processor time (docs/benchmarks.md).
    threads = ThreadPoolExecutor(limits.max_streams, thread_name_prefix="ext_proc")
    server = grpc.server(threads, options=options, maximum_concurrent_rpcs=limits.max_streams)
    server.add_generic_rpc_handlers((picker.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    bound = _bind(server, host, port, "--listen", credentials(config))
    probes = grpc.server(ThreadPoolExecutor(PROBE_THREADS), options=options[2:])
    health_pb2_grpc.add_HealthServicer_to_server(states, probes)
    probed = _bind(probes, host, config.health_port, "--health-port", None)
    try:
        pages, _ = start_http_server(config.metrics_port, host, metrics.registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {config.metrics_port}: {(error.strerror or str(error)).lower()}") from None
    stack.callback(_close, pages)
    for each, grace_s in ((probes, 0.0), (server, limits.stop_s)):
        each.start()
        stack.push_async_callback(_stop, each, grace_s)
    shown = f"[{host}]" if ":" in host else host
    metrics_at = f"http://{shown}:{pages.server_port}/metrics"
    return f"ext_proc at {shown}:{bound}, health at {shown}:{probed}, metrics at {metrics_at}"


async def _stop(server: grpc.Server, grace_s: float) -> None:
    await asyncio.to_thread(server.stop(grace_s).wait)


def _bind(server: grpc.Server, host: str, port: int, flag: str, tls: grpc.ServerCredentials | None) -> int:
    """The port.  Raises ConfigError."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_insecure_port(place) if tls is None else server.add_secure_port(place, tls))
    except RuntimeError as error:
        raise ConfigError(f"{flag}: cannot listen at {place}: is the port taken? ({error})") from None


def _close(pages: WSGIServer) -> None:
    pages.shutdown()
    pages.server_close()


def credentials(config: PickerConfig) -> grpc.ServerCredentials | None:
    """The certificate of ``--tls-cert`` and its key, read again when the files change; None: in clear.

    Raises ConfigError if they cannot be used.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = (expanded_path(name, "TLS file").absolute() for name in (config.tls_cert, config.tls_key))
    certificate = _PickerCertificate(cert, key)
    return grpc.dynamic_ssl_server_credentials(certificate.first, certificate.if_changed)


class _PickerCertificate:
    """A certificate and its key as gRPC takes them.  ``if_changed`` is called with each handshake, by its threads."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError."""
        self._cert, self._key = cert, key
        TlsCertificate(TlsConfig(cert=str(cert), key=str(key)))  # says what is wrong
        self._seen = self._read()
        self.first = self._as_grpc()

    def if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """None: the one in use stays, also while the files do not match."""
        try:
            found = self._read()
            if found == self._seen:
                return None
            TlsCertificate(TlsConfig(cert=str(self._cert), key=str(self._key)))
        except (OSError, ConfigError) as error:
            log_event(log, logging.WARNING, "the old certificate stays in force", reason=str(error))
            return None
        self._seen = found
        log.info("the certificate was read again")
        return self._as_grpc()

    def _read(self) -> tuple[bytes, bytes]:
        return self._key.read_bytes(), self._cert.read_bytes()

    def _as_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration((self._seen,))
