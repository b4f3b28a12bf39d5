"""`python -m gateway.front`: router and gateway in one process, so that a token crosses one process less.

Decision 0020. The router serves its gRPC address to all other clients as it does in a process of its own.
"""

from __future__ import annotations

import logging
import sys

import uvloop

from gateway.app import build_app
from gateway.front_settings import USAGE, FrontSettings
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from proto.service import configure_logging, freeze_memory, stop_event
from proto.settings import ConfigError
from router.local_client import LocalClient
from router.model import ModelError
from router.server import Router


async def serve(settings: FrontSettings) -> None:
    """Until SIGTERM or SIGINT; then the gateway's answers finish first. Raises ModelError, and OSError for a port."""
    stop = stop_event()
    listener = bind(settings.gateway.host, settings.gateway.port)
    router = Router(settings.router)
    await router.start()
    async with LocalClient(router.inference) as client:
        app = build_app(client, Metrics(), settings.gateway.body_limits)
        server = HttpServer(app, listener, drain_timeout_s=settings.gateway.drain_timeout_s)
        await server.start()
        freeze_memory()
        print(
            f"READY front gateway={server.address} router={router.address} metrics={router.metrics_address}", flush=True
        )
        await stop.wait()
        await server.stop()
    await router.stop()


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        return 0
    try:
        settings = FrontSettings.load()
        configure_logging("front", settings.gateway.log_level)
        logging.getLogger("router").setLevel(settings.router.log_level.upper())
        uvloop.run(serve(settings))
    except (ConfigError, ModelError, OSError) as error:
        print(f"front: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
