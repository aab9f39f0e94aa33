"""Ask about an image: ``python image.py picture.jpg "What is this?"`` (pip install openai).

The service must have a vision model, such as Qwen2-VL.
"""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

from openai import OpenAI


def main(path: str, question: str) -> None:
    """Stream the answer."""
    kind = mimetypes.guess_type(path)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    (model,) = client.models.list().data
    stream = client.chat.completions.create(
        model=model.id,
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}],
            }
        ],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "What is in this picture?")
