#!/bin/sh
# Takes the place of the runtime's Python (RSRV_RUNTIME_PYTHON): the same runtime, with a device of known speed.
exec "$RSRV_BENCH_PYTHON" "$(dirname "$0")/paced_runtime.py" "$@"
