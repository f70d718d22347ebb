"""Helm's engine, in a process of its own: Go's runtime keeps the signals of a process to itself, and other tests send some.

    echo '{"chart": ..., "values": ..., "release": ...}' | python helm.py render
    echo '{"chart": ...}' | python helm.py lint

Prints JSON: what each template became, or what there is to say against the chart. Ends with 1 and the reason on stderr
when the chart does not take the values.
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
