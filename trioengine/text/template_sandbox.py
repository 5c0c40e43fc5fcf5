"""The sandbox of chat templates: Jinja's, with each loop, call, operator and output charged to a rendering's budget.

A template comes with the model's file, from anywhere, and is rendered in the API process. Loops, macros and
bare Python operators are charged by the syntax tree's rewriting; other operators, calls, filters, tests and outputs
by Jinja's own hooks. Nothing is evaluated at compile time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner, Namespace

from trioengine.text import template_operations as operations
from trioengine.text.template_filters import FILTERS, TESTS, BoundedContext
from trioengine.text.template_methods import ChatSandbox, FormatMethod, Method, methods_of
from trioengine.text.template_rewriting import INTERNAL_FILTERS, TemplateRefused, rewritten

MAX_SOURCE = 128 << 10  # characters
CALL_STEPS = 5
_LOCALS = ("_block_vars", "_loop_vars")  # which Jinja passes to every call, for functions that want a context


class Raised(Exception):
    """The template called raise_exception(message)."""


def raise_exception(message: Any) -> NoReturn:
    raise Raised(message)


@pass_context
def _finalize(context: BoundedContext, value: Any) -> str:
    return operations.text_of(context.budget, value)


class TemplateEnvironment(ChatSandbox):
    """Compiles chat templates. Renderings need a BoundedContext whose `budget` is set."""

    context_class = BoundedContext
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[loopcontrols],
            optimized=False,
            finalize=_finalize,
        )
        self.filters = {**FILTERS, **INTERNAL_FILTERS}
        self.tests = dict(TESTS)
        allowed = ("range", "dict", "namespace", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in allowed} | {"raise_exception": raise_exception}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateRefused(f"it is longer than {MAX_SOURCE} characters")
        template = super()._parse(source, name, filename)
        return rewritten(template)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        context.budget.charge(1)
        return operations.calculated(context.budget, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __context.budget
        budget.charge(CALL_STEPS)
        for name in _LOCALS:
            kwargs.pop(name, None)
        if isinstance(__obj, FormatMethod):
            return operations.BoundedFormatter(__self, budget).vformat(__obj.text, args, kwargs)
        if isinstance(__obj, BuiltinMethodType):
            return _method(__obj)(budget, __obj.__self__, *args, **kwargs)
        __self._check_call(__obj, args)
        if not isinstance(__obj, Macro):
            budget.measure(*args, *kwargs.values())
        budget.enter()
        try:
            return __context.call(__obj, *args, **kwargs)
        finally:
            budget.leave()

    def _check_call(self, obj: Any, args: tuple[Any, ...]) -> None:
        if isinstance(obj, MethodType):
            is_known = isinstance(obj.__self__, LoopContext | Cycler)
        else:
            is_known = isinstance(obj, Macro | Joiner | Undefined) or any(obj is it for it in self.globals.values())
        if not is_known:
            raise _not_callable(obj)
        if (obj is dict or obj is Namespace) and not all(isinstance(values, Mapping) for values in args):
            raise SecurityError("objects are made of names and objects, not of pairs")  # whose keys it would hash


def _method(bound: BuiltinMethodType) -> Method:
    method = (methods_of(bound.__self__) or {}).get(bound.__name__)
    if method is None:
        raise _not_callable(bound)
    return method


def _not_callable(obj: Any) -> SecurityError:
    return SecurityError(f"a template may not call {type(obj).__name__}")
