"""Ask a model and all its LoRA adapters the same question.

penstock serve MODEL --lora sql=~/adapters/sql --lora poet=~/adapters/poet
python examples/lora.py "List all users:"
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_API_KEY", "none"),
)
prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"

for model in client.models.list():
    answer = client.completions.create(model=model.id, prompt=prompt, max_tokens=40, seed=1)
    kind = f"adapter of {model.parent}" if getattr(model, "parent", None) else "model"
    print(f"{model.id} ({kind}): {answer.choices[0].text.strip()}")
