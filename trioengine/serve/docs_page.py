"""GET /docs: the document of /openapi.json as one HTML page, with a form for each route to try it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from trioengine.serve.openapi import Json
from trioengine.serve.parsing import either

_REF = "#/components/schemas/"


def render_docs(document: Json) -> str:
    """Return the content of the page, without its head."""
    return "\n".join(_parts(document))


def _parts(document: Json) -> Iterator[str]:
    info, components = document["info"], document["components"]
    yield f"<h1>{_text(info['title'])} {_text(info['version'])}</h1>"
    yield f'<p>{_text(info["summary"])}. <a href="openapi.json">openapi.json</a>. {_text(info["description"])}</p>'
    if "securitySchemes" in components:
        yield '<label>Key <input id="key" type="password" autocomplete="off"></label>'
    clients = {tag["name"]: tag["description"] for tag in document["tags"]}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield f'<section id="{operation["operationId"]}"><h2>{method.upper()} <code>{_text(path)}</code></h2>'
            yield f"<p>{_text(operation['summary'])}. <small>{_text(clients[operation['tags'][0]])}</small></p>"
            yield from _operation(operation, components)
            yield from _form(path, method, operation)
            yield "</section>"
    yield "<h1>Types</h1>"
    for name, schema in components["schemas"].items():
        yield f'<section id="{name}"><h2>{name}</h2>'
        yield f"<p>{_text(schema.get('description', ''))}</p>"
        yield from _fields(schema)
        yield "</section>"


def _operation(operation: Json, components: Json) -> Iterator[str]:
    rows = [
        (f"<code>{_text(each['name'])}</code>", _type(each["schema"]), _text(each.get("description", "")))
        for each in operation.get("parameters", ())
    ]
    yield from _table(("Parameter", "Type", ""), rows)
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        yield f"<details><summary>Body: {_type(schema)}</summary>"
        yield from _fields(components["schemas"][schema["$ref"].removeprefix(_REF)])
        yield "</details>"
    rows = []
    for status, response in operation["responses"].items():
        if "$ref" in response:
            response = components["responses"][response["$ref"].rpartition("/")[2]]
        kinds = [f"{_text(kind)}: {_type(each['schema'])}" for kind, each in response.get("content", {}).items()]
        rows.append((status, _text(response["description"]), "<br>".join(kinds)))
    yield "<details><summary>Responses</summary>"
    yield from _table(("Status", "", "Content"), rows)
    yield "</details>"


def _form(path: str, method: str, operation: Json) -> Iterator[str]:
    """A form that docs_page.js sends."""
    yield f'<details><summary>Try it</summary><form data-method="{method.upper()}" data-path="{_text(path)}">'
    for each in operation.get("parameters", ()):
        name, required = _text(each["name"]), " required" * each.get("required", False)
        yield f'<label>{name} <input name="{name}" data-in="{each["in"]}"{required}></label>'
    if body := operation.get("requestBody"):
        example = json.dumps(body["content"]["application/json"]["example"], indent=1)
        yield f'<label>Body <textarea rows="6" spellcheck="false">{_text(example)}</textarea></label>'
    yield "<button>Send</button><output></output></form></details>"


def _fields(schema: Json) -> Iterator[str]:
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p>"
        return
    rows = []
    for name, each in schema["properties"].items():
        need = "required" if name in schema["required"] else "optional"
        rows.append((f"<code>{_text(name)}</code>", need, _type(each), _text(_description(each))))
    yield from _table(("Field", "", "Type", ""), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield "<table><tr>" + "".join(f"<th>{each}</th>" for each in head) + "</tr>"
        yield from ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        yield "</table>"


# ---- schemas -------------------------------------------------------------------------------------------------------


def _type(schema: Json) -> str:
    """Return the type and its bounds in words, as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return either(list(dict.fromkeys(map(_type, schema["anyOf"]))))
    if "enum" in schema:
        return either([f"<code>{_text(json.dumps(value))}</code>" for value in schema["enum"]])
    match schema.get("type"):
        case "array":
            entries = _type(schema["items"]) if schema.get("items") else "any values"
            return f"list of {entries}{_range(schema, 'minItems', 'maxItems', 'entries')}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            values = _type(schema["additionalProperties"])
            return f"object, each value {values}{_range(schema, 'minProperties', 'maxProperties', 'members')}"
        case "object" if "properties" in schema:
            members = "; ".join(
                f"<code>{_text(name)}</code>: {_type(each)}" for name, each in schema["properties"].items()
            )
            return f"object ({members})"
        case "string":
            if "contentSchema" in schema:
                return f"JSON: {_type(schema['contentSchema'])}"
            return "string" + _range(schema, "minLength", "maxLength", "characters")
        case str(kind):
            return kind + _range(schema, "minimum", "maximum")
        case _:
            return "any value"


def _range(schema: Json, low: str, high: str, unit: str = "") -> str:
    match schema.get(low), schema.get(high):
        case None, None:
            return ""
        case None, most:
            bounds = f"at most {most}"
        case least, None:
            bounds = f"at least {least}"
        case least, most:
            bounds = f"{least} to {most}"
    return f" ({bounds} {unit})" if unit else f" ({bounds})"


def _description(schema: Json) -> str:
    """Return the description of a field, or else of the first of its types that has one."""
    options = (option["description"] for option in schema.get("anyOf", ()) if "description" in option)
    return str(schema.get("description") or next(options, ""))


def _text(value: Any) -> str:
    return escape(str(value))
