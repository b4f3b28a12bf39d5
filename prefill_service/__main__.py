"""`python -m prefill_service`: one prefill pod."""

from __future__ import annotations

from pod.main import main
from prefill_service.servicer import PrefillService

if __name__ == "__main__":
    raise SystemExit(main("prefill", PrefillService))
