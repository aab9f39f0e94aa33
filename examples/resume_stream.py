"""A stream that outlives its gateway: it has an idempotency key and resumes after the last complete event.

pip install httpx; penstock serve --gateways 2; python examples/resume_stream.py
Kill a gateway during the response (the log of `penstock serve` names the processes): the text continues.
"""

import json
import sys
import time
import uuid
from collections.abc import Iterator

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
PATIENCE_S = 30


def events(url: str, body: dict) -> Iterator[dict]:
    """Each event of the response once, across broken connections."""
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
                if response.status_code == 503:
                    raise httpx.ReadError("no gateway is ready")
                if response.status_code != 200:
                    sys.exit(response.read().decode())
                name = data = ""
                for line in response.iter_lines():
                    if line.startswith("id: "):
                        name = line[4:]
                    elif line.startswith("data: "):
                        data = line[6:]
                    elif not line and data:  # the event is whole
                        if data == "[DONE]":
                            return
                        event = json.loads(data)
                        if event.get("error", {}).get("code") == "service_unavailable":
                            raise httpx.ReadError("this gateway ends")
                        headers["Last-Event-ID"] = name
                        deadline = time.monotonic() + PATIENCE_S
                        yield event
                        data = ""
        except httpx.TransportError as error:
            print(f"\n[{error}: going on behind event {headers.get('Last-Event-ID', 'none')}]", file=sys.stderr)
            time.sleep(0.2)
    sys.exit("no gateway responds")


def main() -> None:
    """Ask, write, and say what it cost."""
    model = httpx.get(f"{URL}/v1/models", timeout=10).json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        "max_tokens": 600,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for event in events(URL, body):
        if "error" in event:
            sys.exit(event["error"]["message"])
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if event.get("usage"):
            print(f"\n\n{event['usage']['completion_tokens']} tokens, charged as {event['id']}")


if __name__ == "__main__":
    main()
