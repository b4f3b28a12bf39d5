"""`python -m router`: one router in this process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys

import uvloop

from proto.service import configure_logging, freeze_memory, stop_event
from proto.settings import ConfigError
from router.model import ModelError
from router.server import Router
from router.settings import RouterSettings


async def serve(settings: RouterSettings) -> None:
    stopped = stop_event()
    router = Router(settings)
    await router.start()
    freeze_memory()
    print(f"READY router address={router.address} metrics={router.metrics_address}", flush=True)
    await stopped.wait()
    await router.stop()


def main() -> int:
    try:
        settings = RouterSettings.load()
        configure_logging("router", settings.log_level)
        uvloop.run(serve(settings))
    except (ConfigError, ModelError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
