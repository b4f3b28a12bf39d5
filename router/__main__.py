"""`python -m router`: one router in this process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from proto.process import ready_until, run, stop_event
from router.server import Router
from router.settings import RouterSettings


async def serve(settings: RouterSettings) -> None:
    stop = stop_event()
    router = Router(settings)
    await router.start()
    await ready_until(stop, f"router address={router.address} metrics={router.metrics_address}")
    await router.stop()


if __name__ == "__main__":
    raise SystemExit(run("router", RouterSettings.load, serve))
