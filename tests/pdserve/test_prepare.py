"""What `up` refuses before it starts anything."""

from __future__ import annotations

import pytest

from pdserve.checks import LaunchError
from pdserve.console import Reporter
from pdserve.prepare import prepare_draft
from pdserve.settings import UpSettings


def test_a_draft_model_without_drafting_is_refused_in_the_flag_s_own_words() -> None:
    with pytest.raises(LaunchError, match=r"^--speculation off and --draft-model 'tiny': a draft model is needed for"):
        prepare_draft(UpSettings.load(["--draft-model", "tiny"]), Reporter())
