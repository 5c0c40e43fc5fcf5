"""Chat templates: Jinja's sandbox, in which every rendering has a budget of steps and output.

A template comes with the model's file, from anywhere, and is rendered in the API process. It is compiled once, when
the model is loaded. Three places charge a rendering's budget: loops, macros and bare Python operators through the
rewriting of the syntax tree; other operators, calls and outputs through Jinja's hooks in `TemplateEnvironment`;
filters, tests and methods through the tables of `template_filters`. Nothing is evaluated at compile time. Blanks are
trimmed as in Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner, Namespace

from trioengine.core.checks import check_json, rejected
from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.wording import brief, excerpt
from trioengine.text import template_operations as operations
from trioengine.text.messages import IMAGE_PART, copied, text_part
from trioengine.text.prompt_end import PromptEnd
from trioengine.text.template_filters import FILTERS, TESTS, ChatSandbox, FormatMethod, methods_of
from trioengine.text.template_operations import BoundedContext, Budget, TemplateTooCostly, within_budget
from trioengine.text.template_rewriting import INTERNAL_FILTERS, TemplateRefused, rewrite

MAX_SOURCE = 128 << 10  # characters
CALL_STEPS = 5
_LOCALS = ("_block_vars", "_loop_vars")  # Jinja passes these to every call, for functions that take the context
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
RESERVED = ("messages", "bos_token", "eos_token")  # variables that callers do not set
_PROBE = "trioengine"  # a word that a template is rendered with, to see which contents it prints


class ChatTemplate:
    """Renders a conversation as the text that the model was trained on. Safe for threads.

    `strftime` formats the time of the call, for a template's `strftime_now`, which is undefined without it. Raises
    ModelError if the source does not compile, or has a statement that chat templates may not have.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", strftime: Callable[[str], str] | None = None
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = TemplateEnvironment(strftime).from_string(source)
        except Exception as exc:  # jinja2's own errors, and Python's for a template that is nested too deeply
            raise ModelError(f"the chat template does not compile: {excerpt(str(exc))}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the text of a conversation; the template gets these variables as well.

        Raises RequestRejected if the template refuses the messages, fails on them, or exceeds its Budget.
        """
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._tokens}
        context: Any = self._template.new_context({"tools": None, **variables, **own})
        context.budget = budget = Budget([*messages, variables])
        pieces = []
        try:
            for piece in self._template.root_render_func(context):
                budget.charge_output(piece)
                pieces.append(piece)
        except Raised as exc:
            raise _rejected(f"the chat template raised: {exc!s:.1000}") from None
        except TemplateTooCostly as exc:
            raise _rejected(f"the model's chat template {exc} for them") from None
        except Exception as exc:  # the template author's mistake; its details are not for the client
            raise _rejected("the model's chat template cannot render them") from exc
        return "".join(pieces)

    def takes_parts_only(self) -> bool:
        """Return whether the template prints the text of a content's parts, but not a content that is a string.

        Templates of models with images often loop over a list of parts.
        """
        return _PROBE not in self._probe(_PROBE) and _PROBE in self._probe([text_part(_PROBE)])

    def prints_images(self, image_token: str) -> bool:
        """Return whether the template prints the image token for an image, and the text beside it."""
        rendering = self._probe([IMAGE_PART, text_part(_PROBE)])
        return rendering.count(image_token) == 1 and _PROBE in rendering

    def prints_tools(self) -> bool:
        """Return whether the template prints the names of tools."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        return _PROBE in self._probe("", {"tools": [tool]})

    def prints_calls(self) -> bool:
        """Return whether the template prints the names and the arguments of an assistant's tool calls."""
        function = {"name": _PROBE, "arguments": {_PROBE: _PROBE}}
        calls = [{"type": "function", "id": "000000000", "function": function}]  # an id as Mistral's templates want it
        rendering = self._probe("", {}, {"role": "assistant", "content": "", "tool_calls": calls})
        return rendering.count(_PROBE) >= 3

    def _probe(self, content: Any, variables: Mapping[str, Any] = NO_VARIABLES, *others: Mapping[str, Any]) -> str:
        """Render a user's message with this content, and the others; "" if the template refuses them."""
        messages = [{"role": "user", "content": content}, *others]
        try:
            return self.render(messages, add_generation_prompt=False, variables=variables)
        except RequestRejected:
            return ""


def checked_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a copy of variables for a template. Raises RequestRejected for names and values that it may not have."""
    if variables is None:
        return NO_VARIABLES
    name = "chat_template_kwargs"
    if not isinstance(variables, Mapping):
        raise rejected(name, f"must be a mapping, got {brief(variables)}")
    for reserved in RESERVED:
        if reserved in variables:
            raise rejected(name, f"may not have {reserved!r}, which the engine sets")
    PromptEnd.of(variables, f"{name}.")
    check_json(variables, name)
    return cast("Mapping[str, Any]", copied(variables))


def _rejected(problem: str) -> RequestRejected:
    return RequestRejected("template_error", f"messages: {problem}", param="messages")


# ---- the sandbox --------------------------------------------------------------------------------------------------


class Raised(Exception):
    """The template called raise_exception(message)."""


def raise_exception(message: Any) -> NoReturn:
    """Refuse the messages; a global function of templates."""
    raise Raised(message)


class TemplateEnvironment(ChatSandbox):
    """Compiles chat templates. Renderings need a BoundedContext whose `budget` is set."""

    context_class = BoundedContext
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, strftime: Callable[[str], str] | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[loopcontrols],
            optimized=False,
            finalize=within_budget(operations.text_of),
        )
        self.filters = {**FILTERS, **INTERNAL_FILTERS}
        self.tests = dict(TESTS)
        allowed = ("range", "dict", "namespace", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in allowed} | {"raise_exception": raise_exception}
        if strftime is not None:
            self.globals["strftime_now"] = partial(operations.formatted_time, strftime)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateRefused(f"it is longer than {MAX_SOURCE} characters")
        return rewrite(super()._parse(source, name, filename))

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
            method = (methods_of(__obj.__self__) or {}).get(__obj.__name__)
            if method is None:
                raise _not_callable(__obj)
            return method(budget, __obj.__self__, *args, **kwargs)
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
            raise SecurityError("objects are made of names and objects, not of pairs")  # whose keys would be hashed


def _not_callable(obj: Any) -> SecurityError:
    return SecurityError(f"a template may not call {type(obj).__name__}")
