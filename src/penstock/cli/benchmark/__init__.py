"""``penstock bench``: loads an OpenAI endpoint and measures what its clients would feel."""
