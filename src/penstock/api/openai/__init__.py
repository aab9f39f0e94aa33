"""Response formats of OpenAI, vLLM, Jina and Cohere: one module per family of endpoints."""
