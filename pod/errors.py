"""What keeps a pod from starting."""

from __future__ import annotations


class StartupError(Exception):
    """One line that says what is wrong and what to do. The process prints it and exits with code 2."""
