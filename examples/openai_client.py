"""Streams a response with the official client.  pip install openai; penstock serve; python examples/openai_client.py"""

import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = " ".join(sys.argv[1:]) or "Tell me a story about a little fox who was lost."

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    temperature=0.7,
    max_tokens=300,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} in the answer]")
