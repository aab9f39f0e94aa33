"""Parsers of model output: content, reasoning and tool calls, as it arrives.

``registry`` finds the format from the chat template; ``tool_call_formats`` has the families' tool calls, ``parser``
harmony.  Each is a generator over an ``IncrementalReader``, which asks for more text where it cannot decide yet: so
the result depends on the text only, never on how it was split.  Knows nothing about tokens, HTTP or templates'
variables.
"""
