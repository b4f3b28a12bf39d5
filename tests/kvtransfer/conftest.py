"""Asserts of the shared suites explain themselves in failures only when pytest rewrites them."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.kvtransfer.conformance", "tests.kvtransfer.process_conformance", "tests.kvtransfer.support"
)
