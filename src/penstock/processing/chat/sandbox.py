"""The sandbox of chat templates: jinja2's own, with limits on time and memory.

A template is a program from a stranger, and its data come from another.  ``RenderBudget`` stops it when its time is up
and before it makes a value larger than the limit; it is checked in every 256th turn of a loop, in every call, and in
every sum and product.  What could make a large value unseen, and no chat template uses (``center``, ``lipsum``,
``int.to_bytes``, ...), is removed.  Knows nothing about chats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from time import monotonic
from typing import Any

import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.visitor import NodeTransformer

_LOOK_EVERY = 256
_MAX_INT_BITS = 4096


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_FILTERS = _names("batch center filesizeformat format pprint random slice urlize wordwrap xmlattr")
_STRING_METHODS = _names(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
    "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _STRING_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    **dict.fromkeys((bytes, int, float, bool, complex, range, set, frozenset), frozenset[str]()),
}


class LimitReached(jinja2.exceptions.TemplateRuntimeError):
    """The template would need more than it may have."""


class RenderBudget:
    """What one rendering may still use: seconds, and bytes (characters count as one) in one value."""

    def __init__(self, *, seconds: float, max_bytes: int) -> None:
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._max_bytes = max_bytes

    def check_time(self) -> None:
        """Raises LimitReached when the time is over."""
        if monotonic() > self._deadline:
            raise LimitReached(f"The chat template ran for more than {self._seconds:g} s.")

    def check_size(self, size: int) -> None:
        """Raises LimitReached when a value of ``size`` may not be made."""
        if size > self._max_bytes:
            raise LimitReached(f"The chat template would make more than {self._max_bytes} bytes.")


RENDER_BUDGET: ContextVar[RenderBudget] = ContextVar("template_meter")
"""The meter of the rendering that runs in this context.  Without one nothing runs, not even at compile time."""


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """``ImmutableSandboxedEnvironment`` under ``RENDER_BUDGET``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _NO_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        for name, weigh in (("replace", _weigh_replace), ("join", _weigh_join), ("indent", _weigh_indent)):
            self.filters[name] = _weighed_filter(self.filters[name], weigh)
        self.filters["_metered"] = _metered
        self.filters["_weighed"] = _weighed

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _MeterNodes().visit(super()._parse(source, name, filename))
        return template

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        RENDER_BUDGET.get().check_time()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        allowed = _METHODS.get(type(owner))
        if allowed is not None and name not in allowed:
            raise LimitReached(f"Chat templates may not call '{name}' of a {type(owner).__name__}.")
        if isinstance(owner, str) and name == "replace":
            _weigh_replace(owner, *args, **kwargs)
        elif isinstance(owner, str) and name == "join":
            _weigh_join(args[0] if args else (), owner)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 asks for every attribute; what it gets stands in the method's place."""
        return None if super().wrap_str_format(value) is None else _no_format

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _weigh_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


class Namespace(jinja2.utils.Namespace):
    """``namespace()`` without names that begin with an underscore, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


class _MeterNodes(NodeTransformer):
    """Puts the meter where the sandbox has no hook: around what loops iterate over, and what ``~`` joins."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_metered")
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        return _filtered(node, "_weighed")


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    assert isinstance(node, jinja2.nodes.Expr)
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Metered:
    """An iterable that reads the meter; it keeps its length, which templates read as ``length`` of their loop."""

    def __init__(self, items: Iterable[Any], size: int, meter: RenderBudget) -> None:
        self._items, self._size, self._meter = items, size, meter

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        for turn, item in enumerate(self._items):
            if turn % _LOOK_EVERY == 0:
                self._meter.check_time()
            yield item


def _metered(items: Any) -> Any:
    meter = RENDER_BUDGET.get()
    meter.check_time()
    if isinstance(items, Iterable):
        known = items if isinstance(items, Sized) else list(items)
        return _Metered(known, len(known), meter)
    return items


def _weighed(value: Any) -> Any:
    RENDER_BUDGET.get().check_size(len(value) if isinstance(value, str) else 0)
    return value


def _weighed_filter(plain: Callable[..., Any], weigh: Callable[..., None]) -> Callable[..., Any]:
    def run(first: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        weigh(value, *args, **kwargs)
        return plain(first, value, *args, **kwargs)

    def run_plain(value: Any, *args: Any, **kwargs: Any) -> Any:
        weigh(value, *args, **kwargs)
        return plain(value, *args, **kwargs)

    passed = getattr(plain, "jinja_pass_arg", None)
    if passed is None:
        return run_plain
    run.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return run


def _weigh_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    RENDER_BUDGET.get().check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _weigh_join(items: Any, d: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(items, Sized):
        RENDER_BUDGET.get().check_size(len(items) * len(str(d)))


def _weigh_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    step = width if isinstance(width, int) else len(str(width))
    RENDER_BUDGET.get().check_size(len(str(text)) + (str(text).count("\n") + 1) * step)


def _weigh_binop(operator: str, left: Any, right: Any) -> None:
    meter = RENDER_BUDGET.get()
    meter.check_time()
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        meter.check_size(len(left) + len(right))
    elif operator == "*" and numbers:
        _weigh_bits(left.bit_length() + right.bit_length())
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | list | tuple) and isinstance(times, int):
                meter.check_size(len(items) * times)
    elif operator == "**" and numbers:
        _weigh_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        raise LimitReached("Chat templates may not format strings with '%'.")


def _weigh_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise LimitReached(f"The chat template would make a number of more than {_MAX_INT_BITS} bits.")


def _no_format(*_: Any, **__: Any) -> str:
    raise LimitReached("Chat templates may not call 'format' of a str.")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace in a chat template may not have a name like {name!r}.")
