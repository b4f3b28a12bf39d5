"""`python -m decode_service`: one decode pod."""

from __future__ import annotations

from decode_service.servicer import DecodeService
from pod.main import main

if __name__ == "__main__":
    raise SystemExit(main("decode", DecodeService))
