"""Chat templates: jinja2 in a sandbox with bounds, with the settings that Hugging Face's templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner, Namespace

from trioengine.core.bounds import excerpt
from trioengine.core.errors import ModelError, RequestRejected
from trioengine.text import template_operations as operations
from trioengine.text.template_filters import (
    FILTERS,
    TESTS,
    BoundedContext,
    ChatSandbox,
    FormatMethod,
    Method,
    methods_of,
)
from trioengine.text.template_operations import Budget, TemplateTooCostly
from trioengine.text.template_rewriting import INTERNAL_FILTERS, TemplateRefused, rewritten


class ChatTemplate:
    """Renders a conversation as the text that the model was trained on. Safe for threads.

    Raises ModelError if it does not compile, or has a statement that chat templates may not have.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = TemplateEnvironment().from_string(source)
        except Exception as exc:  # jinja2's own, and Python's where the template is nested too deeply
            raise ModelError(f"the chat template does not compile: {excerpt(str(exc))}") from exc

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, within the bounds of `template_budget`.

        Raises RequestRejected where the template does not take the messages, or takes too much for them.
        """
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None}
        context: Any = self._template.new_context(variables | self._tokens)
        context.budget = budget = Budget(messages)
        pieces = []
        try:
            for piece in self._template.root_render_func(context):
                budget.charge_output(piece)
                pieces.append(piece)
        except Raised as exc:
            raise _rejected(f"the chat template says: {exc!s:.1000}") from None
        except TemplateTooCostly as exc:
            raise _rejected(f"the model's chat template {exc} for them") from None
        except Exception as exc:  # the template author's mistake; its details are not for the client
            raise _rejected("the model's chat template cannot render them") from exc
        return "".join(pieces)


def _rejected(problem: str) -> RequestRejected:
    return RequestRejected("template_error", f"messages: {problem}", param="messages")


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


IMAGE_PART = {"type": "image"}
_WORD = "trioengine"


def text_part(text: str) -> dict[str, str]:
    """A text as a part of a content."""
    return {"type": "text", "text": text}


def takes_parts_only(template: ChatTemplate) -> bool:
    """Whether the template prints a text that is a part of a list, and not one that is the content itself."""
    return _WORD not in _rendered(template, _WORD) and _WORD in _rendered(template, [text_part(_WORD)])


def prints_images(template: ChatTemplate, image_token: str) -> bool:
    """Whether the template prints the token for an image, and the text beside it."""
    rendering = _rendered(template, [IMAGE_PART, text_part(_WORD)])
    return rendering.count(image_token) == 1 and _WORD in rendering


def _rendered(template: ChatTemplate, content: Any) -> str:
    """A message with this content; "" if the template refuses it."""
    try:
        return template.render([{"role": "user", "content": content}], add_generation_prompt=False)
    except RequestRejected:
        return ""
