"""The gateway's ASGI app: its routes, and every error in one shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.answer import server_id
from gateway.errors import ApiError, from_pdserve, internal
from gateway.exchange import BodyLimits
from gateway.generation import CHAT, COMPLETIONS, Generation
from gateway.metrics import Metrics
from proto.errors import PdserveError
from proto.inference_pb2 import Ledger, Model
from router.client import Client

LATEST = "latest"  # in place of a request id: the most recent request

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def build_app(router: Client, metrics: Metrics, body_limits: BodyLimits) -> Starlette:
    """The app. It owns none of its arguments."""
    pages = Pages(router, metrics)
    chat = Generation(CHAT, router, metrics, body_limits=body_limits)
    completions = Generation(COMPLETIONS, router, metrics, body_limits=body_limits)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/v1/requests/{request_id}/timeline", pages.timeline),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ApiError: _api_error,
            PdserveError: _pdserve_error,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    return app


class Pages:
    """The small endpoints; all answer GET and HEAD."""

    def __init__(self, router: Client, metrics: Metrics) -> None:
        self._router = router
        self._metrics = metrics

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_model(model) for model in await self._router.list_models()]})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["model"]
        for model in await self._router.list_models():
            if model.id == wanted:
                return _json(_model(model))
        raise ApiError(404, f"the model {wanted!r} does not exist", param="model", code="model_not_found")

    async def timeline(self, request: Request) -> Response:
        """The ledger of a request, by the server's id or the id of its completion."""
        request_id = server_id(request.path_params["request_id"])
        return _json(_ledger(await self._router.timeline("" if request_id == LATEST else request_id)))

    async def health(self, request: Request) -> Response:
        """200 while a request could be served, as a load balancer wants to know; else 503 with the reason."""
        reason = await self._router.why_not_serving()
        if reason is None:
            return _json({"status": "ok"})
        raise ApiError(503, reason, code="not_serving")

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(model: Model) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pdserve",
        "max_model_len": model.max_model_len,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    """`proto.inference.Ledger` as JSON with its field names; protobuf's own JSON writes 64-bit numbers as strings."""
    return {
        "request_id": ledger.request_id,
        "client_request_id": ledger.client_request_id,
        "wall_s": ledger.wall_s,
        "ttft_s": ledger.ttft_s,
        "entries": [{"stage": entry.stage, "seconds": entry.seconds} for entry in ledger.entries],
        "attempts": [
            {
                "prefill_pod": attempt.prefill_pod,
                "decode_pod": attempt.decode_pod,
                "reason": attempt.reason,
                "failure": attempt.failure,
            }
            for attempt in ledger.attempts
        ],
        "transfer_bytes": ledger.transfer_bytes,
        "num_preemptions": ledger.num_preemptions,
        "num_drafts": ledger.num_drafts,
        "num_accepted": ledger.num_accepted,
        "outcome": ledger.outcome,
    }


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, "application/json")


async def _pdserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return await _api_error(request, from_pdserve(error, error.field or None))


async def _bug(request: Request, error: Exception) -> Response:
    """Starlette raises `error` again after the answer, and the server logs it."""
    return await _api_error(request, internal())


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or no such method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message, code = f"{where}: this path answers {allowed} only", "method_not_allowed"
    else:
        message, code = f"{where}: {error.detail}", "unknown_url"
    return await _api_error(request, ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))
