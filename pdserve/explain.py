"""`python -m pdserve explain [REQUEST_ID]`: where a past request's time went."""

from __future__ import annotations

import asyncio

from rich.console import Console

from gateway.answer import server_id
from pdserve import ledger
from pdserve.settings import ExplainSettings
from proto import inference_pb2 as pb
from proto.errors import PodUnavailable
from router.client import RouterClient


def main(settings: ExplainSettings) -> int:
    found = asyncio.run(_timeline(settings))
    Console(highlight=False).print(ledger.render(found))
    return 0


async def _timeline(settings: ExplainSettings) -> pb.Ledger:
    async with RouterClient(settings.router) as router:
        try:
            return await router.timeline(server_id(settings.request_id))
        except PodUnavailable:
            raise PodUnavailable(
                f"no router answers at {settings.router}: start one (`up`), or name it: --router"
            ) from None
