"""The pages for browsers: /docs and /. They load nothing, and show the description as it is."""

import base64
import hashlib
import re
import shutil
from html import escape
from html.parser import HTMLParser

import pytest
import trio
from helpers.clients import open_clients

from trioengine import __version__
from trioengine.serve.docs_page import render_docs

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEYS = {"api_key": "user-key-of-this-test"}
VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """A page that is well formed: its elements and their attributes, and the texts of its styles and scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.inline = {"style": [], "script": []}
        self.text = ""
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self._open and self._open[-1] in self.inline:
            self.inline[self._open[-1]].append(data)
        else:
            self.text += data


def policy_of(answer):
    return dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))


def check_page(answer):
    """It runs only its own style and script, and asks only this server."""
    page, policy = Page(answer.body.decode()), policy_of(answer)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    for name, texts in page.inline.items():
        sources = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert " ".join(sources) == policy.get(f"{name}-src", "")
    assert policy.get("connect-src", "'self'") == "'self'"
    for tag, attributes in page.elements:
        assert not {"src", "style", "action"} & attributes.keys() and not any(
            name.startswith("on") for name in attributes
        )
        assert tag not in ("link", "img", "iframe", "base") and ":" not in attributes.get("href", "")
    return page


@pytest.mark.parametrize("options", [{}, KEYS], ids=["no key", "keys"])
async def test_the_page_of_the_routes(autojump_clock, options):
    async with open_clients(**options) as clients:
        document = (await clients.request("GET", "/openapi.json")).json
        page = check_page(await clients.request("GET", "/docs", **BROWSER))
    inputs = [attributes.get("id") for tag, attributes in page.elements if tag == "input"]
    assert ("key" in inputs) == bool(options)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"].removeprefix("#") for tag, attributes in page.elements if tag == "a"}
    assert links <= {*ids, "openapi.json"}
    forms = [attributes for tag, attributes in page.elements if tag == "form"]
    routes = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert [(form["data-method"], form["data-path"]) for form in forms] == routes
    for item in document["paths"].values():
        for operation in item.values():
            assert operation["summary"] in page.text
    for name, schema in document["components"]["schemas"].items():
        assert name in ids
        assert all(field in page.text for field in schema.get("properties", ()))


FIELDS = {
    "a": ({"type": "integer", "minimum": 0, "maximum": 100}, "integer (0 to 100)"),
    "b": ({"type": "string", "maxLength": 5}, "string (at most 5 characters)"),
    "c": ({"type": "number", "minimum": 0}, "number (at least 0)"),
    "d": ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "boolean or null"),
    "e": ({"enum": ["<x>", 1]}, '<code>"<x>"</code> or <code>1</code>'.replace('"<x>"', escape('"<x>"'))),
    "f": ({"type": "array", "items": {"$ref": "#/components/schemas/T"}}, 'list of <a href="#T">T</a>'),
    "g": ({"type": "array", "minItems": 1}, "list of any values (at least 1 entries)"),
    "h": ({"type": "object", "additionalProperties": {"type": "string"}}, "object, each value string"),
    "i": ({}, "any value"),
}


def test_types_and_texts_of_fields():
    properties = {name: {**schema, "description": f"<{name}>"} for name, (schema, _) in FIELDS.items()}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    info = {"title": "<t>", "version": "1", "summary": "s", "description": "d"}
    document = {"info": info, "tags": [], "paths": {}, "components": {"schemas": {"T": schema}}}
    content = render_docs(document)
    for name, (_, shown) in FIELDS.items():
        need = "required" if name == "a" else "optional"
        row = f"<tr><td><code>{name}</code></td><td>{need}</td><td>{shown}</td><td>&lt;{name}&gt;</td></tr>"
        assert row in content
    assert "<h1>&lt;t&gt; 1</h1>" in content


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
async def test_the_script_of_the_page_is_javascript(autojump_clock, clients, tmp_path):
    page = Page((await clients.request("GET", "/docs")).body.decode())
    path = tmp_path / "page.mjs"
    path.write_text("".join(page.inline["script"]))
    await trio.run_process(["node", "--check", path])


# ---- the first page -------------------------------------------------------------------------------------------------


async def test_home_for_a_browser(autojump_clock, clients):
    answer = await clients.request("GET", "/", host="localhost:8123", **BROWSER)
    page = check_page(answer)
    for text in ("Modeltoy", "Stateawake", f"Version{__version__}", "curl http://localhost:8123/v1/chat/completions"):
        assert text in page.text
    assert 'base_url="http://localhost:8123/v1", api_key="none"' in page.text and 'model="toy"' in page.text
    assert {"docs", "metrics", "openapi.json"} <= {attributes.get("href") for _, attributes in page.elements}
    assert answer.headers["vary"] == "accept"


async def test_home_shows_the_state(autojump_clock, clients):
    await clients.request("POST", "/sleep")
    assert "Stateasleep" in check_page(await clients.request("GET", "/", **BROWSER)).text
    await clients.request("POST", "/wake_up")


@pytest.mark.parametrize("headers", [{}, {"accept": "*/*"}, {"accept": "application/json"}])
async def test_home_for_other_clients(autojump_clock, clients, headers):
    answer = await clients.request("GET", "/", **headers)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.decode().startswith(f"trioengine {__version__}: ")
    assert (answer.headers["vary"], "content-security-policy" in answer.headers) == ("accept", False)


async def test_home_of_a_server_with_keys(autojump_clock):
    """The model's name may be a path: it is for clients with a key."""
    async with open_clients(served_model_name="/home/me/secret.gguf", **KEYS) as clients:
        for path in ("/", "/docs", "/openapi.json"):
            answer = await clients.request("GET", path, **BROWSER)
            assert answer.status == 200
            assert b"secret" not in answer.body and b"of-this-test" not in answer.body
        page = check_page(await clients.request("GET", "/", **BROWSER))
        assert "Authorization: Bearer KEY" in page.text and 'api_key="KEY"' in page.text


async def test_home_escapes_the_names_in_it(autojump_clock):
    async with open_clients(served_model_name="<script>'\"&") as clients:
        answer = await clients.request("GET", "/", **BROWSER)
        page = check_page(answer)
        assert "Model<script>'\"&" in page.text and not page.inline["script"]
        assert not re.search(rb"<script", answer.body)


async def test_a_client_without_a_host(autojump_clock, clients):
    """Over HTTP/1.0 a server without keys refuses it: only loopback names are served."""
    data = await clients.http(b"GET / HTTP/1.0\r\nAccept: text/html\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 403 ")
    async with open_clients(insecure=True) as insecure:
        assert b"http://localhost:8000/v1" in await insecure.http(b"GET / HTTP/1.0\r\nAccept: text/html\r\n\r\n")
