"""A server's own description, and the check that a response is one that it promises, with no member more."""

import copy
import json

from openapi_schema_validator import OAS31Validator

from helpers.clients import events_of
from trioengine.serve.routes import BELOW


class Described:
    """The document of /openapi.json."""

    def __init__(self, document):
        self.document = document
        self.seen = set()  # (path, method, status)
        self._components = closed(copy.deepcopy(document["components"]))

    @classmethod
    async def by(cls, clients):
        return cls((await clients.request("GET", "/openapi.json")).json)

    def operation(self, method, target):
        path = target.partition("?")[0]
        return self.document["paths"].get(path) or next(
            item
            for key, item in self.document["paths"].items()
            if key.endswith("{id}") and path.startswith(key.removesuffix("{id}"))
        )

    def check(self, method, target, answer):
        """Check the status, the content type and the body of a response."""
        operation = self.operation(method, target)[method.lower()]
        response = operation["responses"][str(answer.status)]
        if "$ref" in response:
            response = self.document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        kind = answer.headers["content-type"].partition(";")[0]
        schema = response["content"][kind]["schema"]
        assert ("retry-after" in answer.headers) == ("Retry-After" in response.get("headers", ()))
        if kind == "application/json":
            self.check_json(schema, json.loads(answer.body))
        elif kind == "text/event-stream":
            *events, done = events_of(answer.body)
            assert done == "[DONE]" and events
            for event in events:
                self.check_json(schema["properties"]["data"]["anyOf"][0]["contentSchema"], event)
        self.seen.add((operation["operationId"], answer.status, kind))
        return answer

    def check_other_method(self, path, answer):
        """Check the response to a method that the path does not describe."""
        methods = {method.upper() for method in self.document["paths"][path]}
        if answer.status == 405:
            allowed = set(answer.headers["allow"].split(", "))
            assert allowed == methods | ({"HEAD"} if "GET" in methods else set()), (allowed, methods)
        assert not 200 <= answer.status < 300 and answer.status in (400, 401, 403, 405), answer
        self.check_json({"$ref": "#/components/schemas/ErrorBody"}, json.loads(answer.body))

    def check_json(self, schema, value):
        whole = {**schema, "components": self._components}
        errors = [f"{error.json_path}: {error.message}" for error in OAS31Validator(whole).iter_errors(value)]
        assert errors == [], (errors, value)


def closed(schema):
    """Forbid members that the schema does not name."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("title") != "OpenApi":
            schema["additionalProperties"] = False
        for each in schema.values():
            closed(each)
    elif isinstance(schema, list):
        for each in schema:
            closed(each)
    return schema


def described_path(key):
    """The path of a route in the document."""
    return key.removesuffix(BELOW) + "{id}" if key.endswith(BELOW) else key
