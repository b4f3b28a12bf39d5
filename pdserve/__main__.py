"""`python -m pdserve COMMAND [--option ...]`. A command's settings class is its options; its module does the work.

Exit codes: 0 success, 1 failure, 2 a wrong setting or an unfit machine (one line says which), 130 interrupted.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() runs: nobody wants the traceback of an import

import importlib
import sys
from collections.abc import Sequence

from pdserve.checks import LaunchError
from pdserve.process import CONFIG_ERROR, INTERRUPTED, StartFailed
from pdserve.settings import DemoSettings, DoctorSettings, ExplainSettings, ModelSettings, UpSettings
from proto.errors import PdserveError
from proto.settings import ConfigError, Settings

# Each is also the name of its module, which has `main(settings) -> int`.
COMMANDS: dict[str, type[Settings]] = {
    "up": UpSettings,
    "demo": DemoSettings,
    "explain": ExplainSettings,
    "doctor": DoctorSettings,
    "model": ModelSettings,
}


def usage() -> str:
    lines = [f"  {name:<9} {(cls.__doc__ or '').splitlines()[0]}" for name, cls in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m pdserve COMMAND [--option ...]", "", *lines, "", "COMMAND --help lists options;"]
    ) + (" each may also be set as PDSERVE_OPTION, or in a file given by --config FILE.")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else CONFIG_ERROR
    try:
        return run(argv[0], argv[1:])
    except (LaunchError, ConfigError) as error:
        return fail(error, CONFIG_ERROR)
    except StartFailed as error:
        return fail(error, error.exit_code)
    except PdserveError as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(command: str, argv: Sequence[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}: must be one of {', '.join(COMMANDS)}")
    settings = COMMANDS[command].load(argv)
    code: int = importlib.import_module(f"pdserve.{command}").main(settings)
    return code


def fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main(sys.argv[1:]))
