"""A model whose answers are written down, behind the real service: only the forward pass is replaced.

``python -m scripted_model serve ...`` is ``penstock serve ...`` whose workers draw the tokens of a script (``script``)
instead of a model's.  Supervisor, gateway, HTTP, tokenizer, chat template, parsers, scheduler, prefix cache, grammars
and the hand-over of KV pages are the service's own.
"""
