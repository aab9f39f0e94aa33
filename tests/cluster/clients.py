"""The ``openai`` client of a service under test: it never retries, so a test sees what one request was told."""

from __future__ import annotations

import openai

from .server import PenstockServer


def openai_client(server: PenstockServer) -> openai.OpenAI:
    """To be used as a context: it holds connections."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=110)
