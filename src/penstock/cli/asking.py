"""Flags that name a running service, and one request to it with a JSON response.

Knows how to ask and what can go wrong, not what is asked.
"""

from __future__ import annotations

import argparse
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from penstock.cli.chunks import error_of
from penstock.errors import ConfigError, WorkerError

_MAX_ANSWER_BYTES = 4 << 20
DEFAULT_PORT = 8000


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Declare ``--url`` and ``--api-key``, for ``config.load.load_client``."""
    parser.add_argument("--url", metavar="URL", help="default: PENSTOCK_URL or http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="default: PENSTOCK_API_KEY")


def wants_key(url: str) -> str:
    """The error of a request without a key, or with a wrong one."""
    return f"{url} wants a key: add --api-key KEY or set PENSTOCK_API_KEY"


def nothing_listens(url: str) -> str:
    """The error where no server is: the command that would start one there."""
    port = urlsplit(url if "://" in url else f"http://{url}").port
    with_port = f" --port {port}" if port not in (None, DEFAULT_PORT) else ""
    return f"nothing listens at {url}; start it with `penstock serve{with_port}`"


def ask(
    url: str, api_key: str | None, timeout_s: float, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    """(status, parsed body; None when it is no JSON) of ``GET path``, or of ``POST path`` with a body.

    Raises ConfigError for a URL that is none or a key that is wrong, WorkerError when nothing answers.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: expected something like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    except ValueError as error:  # a port that is no number
        raise ConfigError(f"--url {url}: {error}") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if body is None:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body), headers)
        answer = connection.getresponse()
        raw = answer.read(_MAX_ANSWER_BYTES)
    except ConnectionRefusedError:
        raise WorkerError(nothing_listens(url)) from None
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"no answer from {url}: {error}") from None
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise ConfigError(wants_key(url))
    if answer.status == http.HTTPStatus.FORBIDDEN:  # a key was known, and is not enough
        raise ConfigError(f"{url}: {error_of(raw).message or 'this is not allowed'}")
    try:
        return answer.status, json.loads(raw)
    except ValueError:
        return answer.status, None
