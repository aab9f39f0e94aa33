"""Lines of libraries have our form, or are none: in a process of its own, as loggers are everybody's."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import asyncio
import logging
from penstock.launch.http_server import _adopt_logs
from penstock.telemetry.log import configure_logging

configure_logging("gateway", as_json=True)
_adopt_logs()
logging.getLogger("asyncio").warning("socket.send() raised exception.")
logging.getLogger("python_multipart.multipart").warning("Found invalid character")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
try:
    raise asyncio.CancelledError
except asyncio.CancelledError as cancelled:
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=cancelled)
logging.getLogger("asyncio").error("Task exception was never retrieved")
"""


def test_what_clients_do_wrong_is_no_line_and_what_goes_wrong_here_is_json() -> None:
    """Nor are requests that a process which ends has cancelled."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "Task exception was never retrieved"
    assert json.loads(line)["process"] == "gateway"
