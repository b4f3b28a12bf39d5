"""`python -m tests.support.crashing_pod`: a prefill pod whose engine raises on a prompt that begins with token 13.

It warns of that when it is made.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

from engine.batch import Batch
from engine.fake import FakeRunner
from engine.sequence import SampledToken
from pod.main import main
from prefill_service.servicer import PrefillService


class CrashingRunner(FakeRunner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        logging.getLogger("engine.fake").warning("out of luck\non 13")

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        if any(s.prompt_ids[0] == 13 for s in batch.sequences):
            raise RuntimeError("out of luck")
        return super().execute(batch)


if __name__ == "__main__":
    with mock.patch("pod.build.FakeRunner", CrashingRunner):
        raise SystemExit(main("prefill", PrefillService))
