"""Request processing: parsed JSON to engine requests, and output tokens to text.

Knows nothing about HTTP or workers.
"""
