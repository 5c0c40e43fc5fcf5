"""A check for schemathesis, by SCHEMATHESIS_HOOKS: a response has no member and no event that is not described.

schemathesis's own checks pass members that no schema names, and do not read event streams. Each response that was
checked is a line of `checked.txt` in the working directory: the operation, and the status.
"""

import os
from pathlib import Path

import schemathesis

from helpers.clients import Answer
from helpers.described import Described


@schemathesis.check
def as_described(ctx, response, case) -> None:
    headers = {name: values[0] for name, values in response.headers.items()}
    answer = Answer(response.status_code, headers, response.content)
    operation = case.operation
    described = Described(operation.schema.raw_schema)
    if case.method.lower() == operation.method.lower():
        described.check(operation.method, operation.path, answer)
    else:
        described.check_other_method(operation.path, answer)
    with Path("checked.txt").open("a") as file:
        print(case.method.upper(), operation.path, answer.status, headers["content-type"], file=file)


@schemathesis.hook
def before_call(ctx, case, kwargs) -> None:
    """Ask for a stream, if the environment says STREAMED: few of the cases do by themselves."""
    if "STREAMED" in os.environ and isinstance(case.body, dict):
        case.body["stream"] = True
