"""When a stack can serve as it was asked to: the router sees every pod, and the gateway answers."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections import Counter

POLL_S = 0.05
TIMEOUT_S = 2.0

_PODS = re.compile(r'^pdserve_router_pods\{role="(\w+)",state="ready"\} (\S+)$', re.MULTILINE)


async def router_sees(metrics_address: str, num_prefill: int, num_decode: int) -> None:
    """Waits until the router can reach that many pods of each role. A pod registers before it says READY, so this is
    the router's next look at the registry; without it the first request might find only half of the pods."""
    while True:
        ready = await asyncio.to_thread(ready_pods, metrics_address)
        if ready["prefill"] >= num_prefill and ready["decode"] >= num_decode:
            return
        await asyncio.sleep(POLL_S)


def ready_pods(metrics_address: str) -> Counter[str]:
    """role -> pods that the router can reach; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=TIMEOUT_S) as answer:
            return parse_pods(answer.read().decode())
    except (urllib.error.URLError, TimeoutError):
        return Counter()


def parse_pods(exposition: str) -> Counter[str]:
    return Counter({role: int(float(count)) for role, count in _PODS.findall(exposition)})
