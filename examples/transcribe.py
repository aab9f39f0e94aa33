"""Transcribes an audio file: ``python transcribe.py sound.wav`` (pip install openai).

The service must have an audio model, such as Whisper.
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI


def main(path: str) -> None:
    """Stream the text."""
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    (model,) = client.models.list().data
    for event in client.audio.transcriptions.create(model=model.id, file=Path(path), stream=True):
        if event.type == "transcript.text.delta":
            print(event.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1])
