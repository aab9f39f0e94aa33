"""Triton's interpreter at twice its speed, for tests: what it does again and again, it does once.

It prepares its language anew for each call of a device function within a kernel, and checks every sum of integers for
overflow by computing it a second time.  Neither changes a result; tests are too small for an index to overflow.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def quicken() -> None:
    """For the rest of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    def prepare_once(kernel: Any) -> Any:
        known = [module for module in kernel.__globals__.values() if module is tl or module is tl.core]
        if any(tl.core.is_builtin(module.arange) for module in known):
            return prepare(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = prepare_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
