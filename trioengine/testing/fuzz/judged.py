"""The files that a check judges, for findings, beside the suspects.

A wrong value, such as one argument for another, takes no step of its own: all programs run the same lines, and suspects
do not show it. The check that compares the value knows which files make it.
"""

from __future__ import annotations

import traceback
from pathlib import Path

_HTTP = ("serve/choices.py", "serve/chat.py", "serve/chat_response.py", "serve/completions.py")
_JUDGED = {  # by the module of the check, or more closely by the check
    "answers": ("text/conversation.py", "worker/scheduling/scheduler.py", "worker/scheduling/sequence.py"),
    "answers.check_complete": ("text/grammar.py", "worker/scheduling/grammars.py", "worker/scheduling/sequence.py"),
    "answers.check_logprobs": ("actors/request.py", "worker/scheduling/scheduler.py"),
    "answers.check_parts": ("text/output.py", "text/tool_answer.py", "text/tool_calls.py"),
    "callers._check_sum": ("actors/generation.py", "actors/request.py", "text/output.py"),
    "callers._read": ("actors/generation.py", "actors/request.py"),
    "client_callers": ("client/problems.py", "client/connection.py", "client/client.py"),
    "client_callers.expect_aborts": ("client/client.py", "client/session.py", "client/generation.py"),
    "client_oracles": ("client/generation.py", "client/session.py", "client/conversation.py"),
    "client_oracles.check_call": ("client/client.py", "client/generation.py"),
    "client_oracles.check_gone": ("client/client.py", "client/connection.py"),
    "client_oracles.check_left": ("client/session.py", "client/connection.py"),
    "client_oracles.check_names": ("client/client.py", "client/connection.py"),
    "client_oracles.check_prompt": ("client/prompt.py", "client/conversation.py"),
    "client_oracles.check_same": ("client/conversation.py", "client/prompt.py", "serve/realtime/items.py"),
    "client_oracles.check_state": ("client/connection.py", "client/client.py"),
    "client_oracles.check_text": ("client/generation.py", "client/answer.py", "serve/realtime/output.py"),
    "client_oracles.check_usage": ("client/answer.py", "client/generation.py", "serve/realtime/response.py"),
    "client_oracles.check_user": ("client/client.py", "client/connection.py"),
    "conversations.check_dropped": ("text/conversation.py", "actors/images.py"),
    "conversations.check_seen": ("actors/images.py", "worker/scheduling/images.py", "worker/scheduling/pictures.py"),
    "http_answers": _HTTP,
    "http_answers.check_logprobs": ("serve/completion_logprobs.py", "serve/chat_response.py"),
    "http_answers._take_call": ("serve/chat_tools.py", "serve/chat_response.py"),
    "http_books": ("serve/metrics.py", "actors/statistics.py", "serve/limits.py", "serve/response_bytes.py"),
    "http_judge": _HTTP,
    "http_judge._check_beyond": ("serve/limits.py", "serve/connection.py", "serve/http_connection.py"),
    "http_judge._judge_error": ("serve/choices.py", "serve/errors.py", "serve/chat_request.py"),
    "http_judge._judge_refusal": ("serve/http.py", "serve/body.py", "serve/limits.py", "serve/responses.py"),
    "http_machine": ("serve/choices.py", "serve/http_connection.py", "serve/http.py"),
    "leftovers": ("actors/runtime.py", "actors/sessions.py", "actors/gate.py", "actors/attachment.py"),
    "oracles._check_lost": ("actors/recovery.py", "actors/request.py"),
    "oracles._check_refusal": ("actors/admission.py", "actors/gate.py", "core/checks.py"),
    "oracles._check_waiting": ("actors/waiting_line.py", "actors/gate.py"),
    "oracles.check_aborted": ("actors/sessions.py", "actors/session_actor.py"),
    "oracles.check_all_aborted": ("actors/sessions.py", "actors/session_actor.py"),
    "oracles.check_books": ("core/ledger.py", "actors/gate.py"),
    "oracles.check_counts": ("actors/statistics.py", "core/ledger.py"),
    "oracles.check_deadline": ("actors/request.py", "actors/generation.py", "actors/session_actor.py"),
    "oracles.check_decided": ("actors/session_actor.py", "actors/request.py"),
    "oracles.check_holder": ("actors/session_actor.py", "actors/session_opening.py", "text/conversation.py"),
    "oracles.check_limits": ("actors/gate.py", "actors/waiting_line.py"),
    "oracles.check_line": ("actors/sessions.py", "actors/waiting_line.py"),
    "oracles.check_opening": ("actors/waiting_line.py", "actors/gate.py", "actors/session_opening.py"),
    "oracles.check_reader": ("actors/request.py", "actors/session_actor.py", "text/conversation.py"),
    "oracles.check_served": ("actors/waiting_line.py", "actors/gate.py", "actors/admission.py"),
    "oracles.check_shutdown": ("actors/incarnation.py", "actors/supervisor.py"),
    "oracles.check_stopped": ("actors/sessions.py", "actors/session_actor.py"),
    "oracles.check_worker": (
        "actors/attachment.py",
        "worker/scheduling/engine_core.py",
        "worker/scheduling/scheduler.py",
    ),
    "payload_watch": ("actors/payload.py", "actors/images.py", "actors/link.py"),
    "realtime_client": ("serve/realtime/carrier.py", "serve/realtime/connection.py", "serve/realtime/endpoint.py"),
    "realtime_client.check_bytes": ("serve/realtime/items.py", "serve/realtime/connection.py"),
    "realtime_conversation": ("serve/realtime/connection.py", "serve/realtime/items.py", "serve/realtime/outbox.py"),
    "realtime_conversation._check_refused": ("serve/realtime/events.py", "serve/realtime/settings.py"),
    "realtime_conversation._check_shown": ("serve/realtime/item.py", "serve/realtime/items.py"),
    "realtime_conversation._update": ("serve/realtime/settings.py", "serve/realtime/connection.py"),
    "realtime_machine": ("serve/realtime/connection.py", "serve/realtime/outbox.py", "serve/realtime/resumable.py"),
    "realtime_response": ("serve/realtime/prompt.py", "serve/realtime/response.py", "serve/realtime/output.py"),
    "realtime_session": ("serve/realtime/resumable.py", "serve/realtime/outbox.py", "serve/realtime/handshake.py"),
    "realtime_shapes": ("serve/realtime/output.py", "serve/realtime/response.py", "serve/realtime/item.py"),
    "realtime_shapes.check_event": ("serve/realtime/outbox.py", "serve/realtime/connection.py"),
    "realtime_shapes.check_usage": ("serve/realtime/response.py", "serve/realtime/prompt.py"),
    "request_log": ("actors/gate.py", "actors/admission.py", "actors/waiting_line.py"),
    "request_log.check": ("core/ledger.py", "actors/statistics.py", "actors/request.py"),
    "timeouts": ("actors/generation.py", "actors/request.py"),
    "usage_log": ("actors/statistics.py", "worker/scheduling/scheduler.py", "actors/session_actor.py"),
    "usage_log.check": ("worker/scheduling/sequence.py", "worker/scheduling/scheduler.py", "actors/request.py"),
}


def judged(error: BaseException) -> tuple[str, ...]:
    """Return the files, relative to the package, that the check of ours which failed judges, if it was one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames if isinstance(error, AssertionError) else []):
        file = Path(frame.f_code.co_filename)
        if file.parent != Path(__file__).parent:
            break
        check = f"{file.stem}.{frame.f_code.co_name}"
        if files := _JUDGED.get(check, _JUDGED.get(file.stem, ())):
            return files
    return ()
