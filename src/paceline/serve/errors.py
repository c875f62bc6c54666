"""Every error as OpenAI's clients read it: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline.errors import ConfigError, EngineClosedError, EngineStepError, PacelineError, PromptError, QueueFullError
from paceline.serve.disconnect import ClientGone
from paceline.serve.protocol import ChatRequest, CompletionRequest

_log = logging.getLogger("paceline.serve")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MODELS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_FIELDS = {name: name for name in (*ChatRequest.model_fields, *CompletionRequest.model_fields)}
_ELSEWHERE = {  # fields that another route has
    ("/v1/completions", "messages"): "send them to /v1/chat/completions",
    ("/v1/completions", "max_completion_tokens"): "here it is max_tokens",
    ("/v1/chat/completions", "prompt"): "send it to /v1/completions, or as messages",
    ("/tokenize", "text"): "send it as prompt, or messages",
    ("/v1/chat/completions", "response_format.schema"): "put it into response_format.json_schema.schema",
    ("/v1/completions", "response_format.schema"): "put it into response_format.json_schema.schema",
}
_RULES = {  # of pydantic's errors those that do not say what to do
    "missing": "missing: give it",
    "too_short": "must not be empty",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
_VARIANTS = frozenset({"bool", "int", "float", "str"})  # that a place names where a field takes several types
_FIELDS |= dict.fromkeys(("speculation", "method", "num_speculative_tokens"), "speculative")  # the engine's words


class ApiError(Exception):
    """A request that is refused: an HTTP status, one line of text, and the field at fault if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_field(field: str, reason: str) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, f"{field}: {reason}", param=field)


def as_api_error(error: Exception) -> ApiError:
    """The HTTP side of an error; what was not foreseen is logged, and says nothing of itself."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_seconds)})
    if isinstance(error, (ConfigError, PromptError)):
        first = re.match(r"\w+", str(error))
        return ApiError(400, str(error), param=None if first is None else _FIELDS.get(first[0]))
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed", headers={"Retry-After": "10"})
    if isinstance(error, EngineStepError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, PacelineError):
        return ApiError(500, str(error))
    _log.error("unexpected %s", type(error).__name__, exc_info=error)
    return ApiError(500, f"unexpected {type(error).__name__}: the server's log has the details.")


def install(app: FastAPI) -> None:
    """Makes the app answer with these errors alone."""

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(request, error.errors()).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        method, path = request.method, request.url.path
        if error.status_code == 404:
            hint = "/openapi.json lists the routes."
            if f"/v1{path}" in app.openapi()["paths"]:
                hint = f"did you mean /v1{path}? A client's base URL ends in /v1."
            return ApiError(404, f"there is no {path}: {hint}").response()
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            return ApiError(405, f"{path} does not take {method}: use {allowed}.").response()
        return ApiError(
            error.status_code, f"the body is not JSON in UTF-8 ({error.detail}): send an object."
        ).response()

    @app.exception_handler(ClientGone)
    async def leave(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's number for it goes to the log

    @app.exception_handler(PacelineError)
    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()


def _invalid(request: Request, errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body; of the variants that a field may take, the one that came
    furthest, or was right but for its length. A field that belongs elsewhere comes before all others."""
    path = request.url.path
    for error in errors:
        name = _name(error)
        if error["type"] == "extra_forbidden" and (hint := _ELSEWHERE.get((path, name or ""))):
            return ApiError(400, f"{name}: not a field of {path}: {hint}.", param=name, code="unsupported_field")
    first = errors[0]
    field = _place(first)[:1]
    of_field = (error for error in errors if _place(error)[:1] == field)
    worst = max(of_field, key=lambda error: (error["type"] == "too_long", len(_place(error))))
    name = _name(worst)
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({worst['ctx']['error']}): send an object.")
    if worst["type"] == "extra_forbidden":
        name = name or f"{_place(worst)[-1]!r:.64}"
        reason = "this server does not support the field, and would ignore it: drop it."
        fields = _MODELS[path].model_fields if path in _MODELS and len(_place(worst)) == 1 else ()
        if near := get_close_matches(name, fields, n=1, cutoff=0.8):
            reason = f"there is no such field: did you mean {near[0]}?"
        return ApiError(400, f"{name}: {reason}", param=name, code="unsupported_field")
    if name is None:
        kind = request.headers.get("content-type")
        if worst["type"] == "missing":
            return ApiError(400, "the body is empty: send a JSON object.")
        if kind is None or "json" not in kind:
            sent = f"the content type is {kind!r:.80}" if kind else "there is no content type"
            return ApiError(400, f"{sent}: send the header content-type: application/json.")
        return ApiError(400, "the body must be a JSON object.")
    given = f"; got {worst['input']!r:.100}" if isinstance(worst["input"], (int, float, str)) else ""
    rule = _RULES.get(worst["type"]) or worst["msg"][0].lower() + worst["msg"][1:]
    return ApiError(400, f"{name}: {rule}{given}.", param=name, code=worst["type"])


def _name(error: Any) -> str | None:
    """The field at fault, with its place in lists and objects; None for the body as a whole, or a field without a
    proper name."""
    place = [str(part) for part in _place(error) if re.fullmatch(r"\w{1,64}", str(part)) and part not in _VARIANTS]
    return ".".join(place) or None


def _place(error: Any) -> tuple[int | str, ...]:
    return tuple(error["loc"][1:])
