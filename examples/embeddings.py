"""Finds the nearest text.  pip install openai; penstock serve BAAI/bge-small-en-v1.5; python examples/embeddings.py"""

import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
texts = ["The fox sleeps in the forest.", "Interest rates rose again.", "A recipe for lentil soup."]
question = " ".join(sys.argv[1:]) or "What do animals do at night?"

answer = client.embeddings.create(model=model, input=[question, *texts])
query, *vectors = [item.embedding for item in answer.data]
scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
    print(f"{score:.3f}  {text}")
