"""Sends a request without a seed and repeats it with the seed that the response reports: the same tokens.

pip install openai; penstock serve; python examples/reproduce_seed.py
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
question = {
    "model": client.models.list().data[0].id,
    "messages": [{"role": "user", "content": "Tell me a story about a clever bird."}],
    "temperature": 1.0,
    "max_tokens": 120,
}

first = client.chat.completions.create(**question)
seed = first.model_extra["penstock"]["seed"]
second = client.chat.completions.create(**question, seed=seed)

print(first.choices[0].message.content)
print(f"\nseed {seed}, {first.system_fingerprint}")
assert first.choices[0].message.content == second.choices[0].message.content
print("asked again with this seed: the same answer")
