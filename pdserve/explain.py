"""`python -m pdserve explain [REQUEST_ID]`: where a past request's time went."""

from __future__ import annotations

import asyncio

from rich.console import Console

from pdserve import ledger
from pdserve.client import timeline
from pdserve.settings import ExplainSettings


def main(settings: ExplainSettings) -> int:
    found = asyncio.run(timeline(settings.router, settings.request_id))
    Console(highlight=False).print(ledger.render(found))
    return 0
