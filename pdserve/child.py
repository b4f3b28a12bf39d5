"""Runs a command that dies with its launcher: `python -I -S child.py LAUNCHER_PID COMMAND [ARGUMENT ...]`.

The kernel sends SIGKILL to this process when the launcher's main thread ends, however it ends, so that even a
`kill -9` of the launcher leaves nothing running. The setting survives `exec`, so the command needs to know nothing of
it; KV memory is a memfd and the registry holds no files, so SIGKILL leaves nothing behind either. A file of its own
rather than a `preexec_fn`: code between fork and exec is not safe in a process that has threads (gRPC's).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == launcher:  # else it died before the setting took effect
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
