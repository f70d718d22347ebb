"""Run Helm's engine in a process of its own, because Go's runtime takes over the process's signals.

    echo '{"chart": ..., "values": ..., "release": ...}' | python helm.py render
    echo '{"chart": ...}' | python helm.py lint

Prints JSON: the rendered templates, or the linter's messages. If the chart refuses the values, it exits 1
with the reason on stderr.
"""

from __future__ import annotations

import json
import sys

import helm_python


def main(action: str) -> None:
    request = json.load(sys.stdin)
    if action == "lint":
        json.dump(helm_python.lint(request["chart"]), sys.stdout)
        return
    try:
        with helm_python.Chart.load(request["chart"]) as chart:
            files = chart.render(request["values"], name=request["release"], namespace="prod")
    except helm_python.HelmError as error:
        sys.exit(str(error))
    json.dump(files, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
