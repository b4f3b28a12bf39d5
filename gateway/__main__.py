"""`python -m gateway`: the HTTP front door as a process of its own."""

from __future__ import annotations

from gateway.app import build_app
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from gateway.settings import GatewaySettings
from proto.process import ready_until, run, stop_event
from router.gateway_client import GatewayClient


async def serve(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError when the port cannot be had."""
    stop = stop_event()
    listener = bind(settings.host, settings.port)
    async with GatewayClient(settings.router) as router:
        app = build_app(router, Metrics(), settings.body_limits)
        server = HttpServer(app, listener, drain_timeout_s=settings.drain_timeout_s)
        await server.start()
        await ready_until(stop, f"gateway address={server.address}")
        await server.stop()


if __name__ == "__main__":
    raise SystemExit(run("gateway", GatewaySettings.load, serve))
