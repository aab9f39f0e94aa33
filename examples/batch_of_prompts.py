"""Many prompts in one request, two responses each.

pip install openai; penstock serve; python examples/batch_of_prompts.py
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
prompts = ["Once upon a time there was a little boat", "The king was tired", "Deep in the forest"]
answers = client.completions.create(
    model=client.models.list().data[0].id, prompt=prompts, n=2, max_tokens=30, temperature=0.8, seed=1
)
for choice in answers.choices:  # choice i belongs to prompt i // n
    print(f"{prompts[choice.index // 2]}...{choice.text!r} ({choice.finish_reason})")
