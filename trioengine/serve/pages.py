"""The pages that a server has about itself: GET /, /docs and /openapi.json. They need no key, and have no secrets.

Pages load nothing: their style and script are in them, and their Content-Security-Policy allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from pathlib import Path

from trioengine import __version__
from trioengine.actors.engine import Engine
from trioengine.serve.auth import Role
from trioengine.serve.docs_page import render_docs
from trioengine.serve.http import HttpRequest, HttpResponse
from trioengine.serve.openapi import Json, describe
from trioengine.serve.responses import OpenApi
from trioengine.serve.routes import REALTIME, Operation, Routes, get, state_of

HOME = (
    f"trioengine {__version__}: a language model engine. POST to /v1/chat/completions as to OpenAI, or connect a "
    f"WebSocket to {REALTIME} (the text part of OpenAI's Realtime protocol). GET /health reports whether the "
    "engine lives, /ready whether it admits requests, /metrics its metrics (Prometheus), /version its version.\n"
)
_HTML, _TEXT = b"text/html; charset=utf-8", b"text/plain; charset=utf-8"
_HERE = Path(__file__).parent
_HOME = Operation("Name the version and the first routes to try", texts=("text/plain", "text/html"))
_DOCS = Operation("Describe the routes, as a page", texts=("text/html",))
_OPENAPI = Operation("Describe the routes, in OpenAPI 3.1", responses={200: OpenApi})


def pages(routes: Routes, engine: Engine, model: str, *, has_keys: bool, scheme: str, root: str) -> Routes:
    """Return the routes of the pages about these routes; the description is made when a client first asks for it."""

    async def home(request: HttpRequest) -> HttpResponse:
        if not wants_html(request):
            return HttpResponse(200, HOME.encode(), _TEXT, ((b"vary", b"accept"),))
        shown = "" if has_keys else model  # a name may disclose something: with keys it is for users
        page = _home_page(request, shown, state_of(engine), has_keys=has_keys, scheme=scheme, root=root)
        return html_response(page, more=((b"vary", b"accept"),))

    async def docs(request: HttpRequest) -> HttpResponse:
        page: HttpResponse = await engine.ports.run_in_thread(docs_page)
        return page

    async def openapi(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, await engine.ports.run_in_thread(document))

    own = {
        "/": get(home, _HOME, Role.ANYONE),
        "/docs": get(docs, _DOCS, Role.ANYONE),
        "/openapi.json": get(openapi, _OPENAPI, Role.ANYONE),
    }

    @cache
    def description() -> Json:
        return describe({**own, **routes}, has_keys=has_keys, root=root)

    @cache
    def document() -> bytes:
        return json.dumps(description()).encode()

    @cache
    def docs_page() -> HttpResponse:
        return html_response(render_docs(description()), script=(_HERE / "docs_page.js").read_text())

    return own


def wants_html(request: HttpRequest) -> bool:
    """Whether the client is a browser."""
    return b"text/html" in (request.header(b"accept") or b"").lower()


def html_response(content: str, *, script: str = "", more: tuple[tuple[bytes, bytes], ...] = ()) -> HttpResponse:
    """Return a page, which may run this script and no other, and ask this server only."""
    style = (_HERE / "docs_page.css").read_text()
    policy = f"default-src 'none'; style-src {_source(style)}; base-uri 'none'; form-action 'none'"
    policy += "; frame-ancestors 'none'"
    if script:
        policy += f"; script-src {_source(script)}; connect-src 'self'"
        content += f"<script>{script}</script>"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>trioengine</title>'
    view = '<meta name="viewport" content="width=device-width">'
    body = f"{head}{view}<style>{style}</style><body>{content}</body></html>"
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        *more,
    )
    return HttpResponse(200, body.encode(), _HTML, headers)


def _source(text: str) -> str:
    """Return the source expression of an inline style or script (CSP 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- the first page ------------------------------------------------------------------------------------------------

_CURL = """curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{
  "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32
}}'"""
_OPENAI = """from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
completion = client.chat.completions.create(
    model={model}, messages=[{{"role": "user", "content": "Hello"}}], max_tokens=32
)
print(completion.choices[0].message.content)"""


def _home_page(request: HttpRequest, model: str, state: str, *, has_keys: bool, scheme: str, root: str) -> str:
    host = (request.header(b"host") or b"localhost:8000").decode("ascii")
    base = f"{root}/" if root else ""  # relative: right also behind a proxy whose prefix is not configured
    url = f"{scheme}://{host}{root}"
    curl = _CURL.format(url=url, key=" -H 'Authorization: Bearer KEY'" if has_keys else "")
    name = json.dumps(model) if model else "client.models.list().data[0].id"
    openai = _OPENAI.format(url=url, key="KEY" if has_keys else "none", model=name)
    shown = escape(model) if model else "<code>/v1/models</code> names it to clients with a key"
    return f"""<h1>trioengine {__version__}</h1>
<table>
<tr><th>Model</th><td>{shown}</td></tr>
<tr><th>State</th><td>{state}</td></tr>
<tr><th>Version</th><td>{__version__}</td></tr>
</table>
<p><a href="{base}docs">The routes</a> (<a href="{base}openapi.json">OpenAPI</a>) · <a href="{base}metrics">metrics</a>
 · <a href="{base}health">health</a> · <a href="{base}ready">readiness</a></p>
<p>The documentation lies beside the package, in <code>share/doc/trioengine</code>.</p>
<h2>curl</h2>
<pre>{escape(curl)}</pre>
<h2>Python, with the package openai</h2>
<pre>{escape(openai)}</pre>
"""
