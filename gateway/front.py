"""`python -m gateway.front`: router and gateway in one process, so that a token crosses one process less.

Decision 0020. The router serves its gRPC address to all other clients as it does in a process of its own.
"""

from __future__ import annotations

import logging
import sys

from gateway.app import build_app
from gateway.front_settings import USAGE, FrontSettings
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from proto.process import ready_until, run, stop_event
from router.local_client import LocalClient
from router.server import Router


async def serve(settings: FrontSettings) -> None:
    """Until SIGTERM or SIGINT; then the gateway's answers finish first. Raises ModelError, and OSError for a port."""
    logging.getLogger("router").setLevel(settings.router.log_level.upper())
    stop = stop_event()
    listener = bind(settings.gateway.host, settings.gateway.port)
    router = Router(settings.router)
    await router.start()
    async with LocalClient(router.inference) as client:
        app = build_app(client, Metrics(), settings.gateway.body_limits)
        server = HttpServer(app, listener, drain_timeout_s=settings.gateway.drain_timeout_s)
        await server.start()
        where = f"gateway={server.address} router={router.address} metrics={router.metrics_address}"
        await ready_until(stop, f"front {where}")
        await server.stop()
    await router.stop()


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        return 0
    return run("front", FrontSettings.load, serve)


if __name__ == "__main__":
    raise SystemExit(main())
