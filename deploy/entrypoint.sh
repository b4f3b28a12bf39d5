#!/bin/sh
# Becomes `python -m MODULE --flag ...`. PDSERVE_MODEL may be a name: the router reads only directories, so it is
# resolved here, which converts the default model the first time (under a lock: others wait).
set -eu
if [ -n "${PDSERVE_MODEL:-}" ]; then
    PDSERVE_MODEL=$(.venv/bin/python -m pdserve model "$PDSERVE_MODEL")
    export PDSERVE_MODEL
fi
exec .venv/bin/python -m "$@"
