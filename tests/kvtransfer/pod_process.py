"""`python -m tests.kvtransfer.pod_process RUNTIME_DIR EPOCH`: a prefill pod's end of transfers."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kvtransfer.pods import fill, make_endpoint
from tests.kvtransfer.support import serve, until


def main() -> None:
    runtime_dir, epoch = sys.argv[1:]
    with make_endpoint("prefill", "shm", Path(runtime_dir), epoch) as endpoint:
        fill(endpoint)

        def notes(count: int) -> list[tuple[int, str]]:
            got: list[tuple[int, str]] = []

            def enough() -> bool:
                got.extend((n.action, n.lease_id) for n in endpoint.poll_notifications())
                return len(got) >= count

            until(enough)
            return got

        def reuse(block: int) -> None:
            endpoint.generations[block] += 1

        serve({"describe": lambda: endpoint.describe().SerializeToString().hex(), "notes": notes, "reuse": reuse})


if __name__ == "__main__":
    main()
