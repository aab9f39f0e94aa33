"""The HTTP server: OpenAI's API in front of token streams.

Knows nothing about tokenizers, workers or processes; it sees what lies behind it through ``interfaces`` only.  No
other package but the catalogue's front imports the web framework.
"""
