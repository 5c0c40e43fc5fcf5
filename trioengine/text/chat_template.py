"""Chat templates: jinja2 in a sandbox with bounds, with the settings that Hugging Face's templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trioengine.core.bounds import excerpt
from trioengine.core.errors import ModelError, RequestRejected
from trioengine.text.template_budget import Budget, TemplateTooCostly
from trioengine.text.template_sandbox import Raised, TemplateEnvironment


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
