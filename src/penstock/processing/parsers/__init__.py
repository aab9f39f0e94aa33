"""What a model wrote, taken apart: content, reasoning and tool calls, while it arrives.

``detect.py`` sees from a chat template in which format its model answers; ``formats.py`` has the families whose calls
stand between marks, ``tagged.py``, ``pythonic.py`` and ``harmony.py`` the others.  Each is a generator over a
``Reader`` (``reader.py``), which asks for more text where it cannot decide yet: so the message depends on the text
only, never on the pieces it came in, and a whole answer is a stream of one piece (``parser.py``).

Knows nothing about tokens, HTTP or templates' variables.
"""
