"""The HTTP face: OpenAI's API in front of token streams.

Knows nothing about tokenizers, workers or processes; ``wire.ports`` is all it sees of the rooms behind it.  Only this
room imports the web framework.
"""
