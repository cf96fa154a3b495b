"""Completes `/openapi.json`: adds the bodies that the gateway reads without FastAPI, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_PLACE: Final = "#/components/schemas/"
_TEXT_OR_NULL: Final = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_FIELDS: Final[dict[str, Any]] = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": _TEXT_OR_NULL,
    "code": _TEXT_OR_NULL,
}
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {"type": "object", "required": list(_FIELDS), "additionalProperties": False, "properties": _FIELDS}
    },
}
_ERRORS: Final = {  # errors of every operation
    400: "The request is invalid, or asks for something that is not supported",
    401: "No API key or token, or a wrong one",
    403: "The API key does not permit this",
    404: "There is no such model, adapter, response, branch or path",
    408: "The request did not arrive in time",
    421: "The Host header names another server",
    500: "The gateway or a worker failed because of a bug",
    503: "No worker can answer now, or the gateway is stopping",
}
_ERRORS_OF_WORK: Final = {  # further errors of operations that workers compute
    413: "The body is too large",
    415: "The Content-Type of the body is not JSON",
    429: "A limit of the API key is reached, or the queue is full",
    501: "The worker does not support this",
    504: "The answer was not complete before the deadline",
}


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the description of an operation's body and answer, which FastAPI cannot know."""
    schema = {"$ref": f"{_PLACE}{kind.__name__}"}
    found: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if "stream" in kind.model_fields:
        found["responses"] = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    return found


def complete(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Adds the fields of bodies, and the errors, to the description of an application."""
    kinds: list[tuple[type[BaseModel], Any]] = [(kind, "validation") for kind in bodies]
    _, found = models_json_schema(kinds, ref_template=_PLACE + "{model}")
    make = app.openapi

    def openapi() -> dict[str, Any]:
        told = make()
        told["components"] = {"schemas": {**found["$defs"], "Error": _ERROR}}
        for methods in told["paths"].values():
            for method, operation in methods.items():
                _add_errors(operation, _ERRORS if method == "get" else _ERRORS | _ERRORS_OF_WORK)
        return told

    app.openapi = openapi  # type: ignore[method-assign]


def _add_errors(operation: dict[str, Any], errors: dict[int, str]) -> None:
    """Describes the errors of an operation. Removes FastAPI's own form of error for wrong parameters."""
    content = {"application/json": {"schema": {"$ref": f"{_PLACE}Error"}}}
    operation["responses"].pop("422", None)
    operation["responses"] |= {
        str(status): {"description": text, "content": content} for status, text in sorted(errors.items())
    }
