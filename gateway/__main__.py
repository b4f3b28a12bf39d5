"""`python -m gateway`: the HTTP front door as a process of its own."""

from __future__ import annotations

import sys

import uvloop

from gateway.app import build_app
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from gateway.settings import GatewaySettings
from proto.service import configure_logging, freeze_memory, stop_event
from proto.settings import ConfigError
from router.gateway_client import GatewayClient


async def serve(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError when the port cannot be had."""
    stop = stop_event()
    listener = bind(settings.host, settings.port)
    async with GatewayClient(settings.router) as router:
        app = build_app(router, Metrics(), settings.body_limits)
        server = HttpServer(app, listener, drain_timeout_s=settings.drain_timeout_s)
        await server.start()
        freeze_memory()
        print(f"READY gateway address={server.address}", flush=True)
        await stop.wait()
        await server.stop()


def main() -> int:
    try:
        settings = GatewaySettings.load()
        configure_logging("gateway", settings.log_level)
        uvloop.run(serve(settings))
    except (ConfigError, OSError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
