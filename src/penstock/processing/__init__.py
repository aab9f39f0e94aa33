"""From parsed JSON to checked requests, and from tokens back to text.

Knows nothing about HTTP, workers or how an answer is sent.  Only this room imports the tokenizer library and jinja2.
"""
