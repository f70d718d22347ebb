"""Run Helm's engine in a separate process, because Go's runtime takes over the process's signals.

Each line of the input is a request, and each line of the output is the answer to a request:

    {"do": "render", "chart": ..., "values": ..., "release": ...}    {"answer": the rendered templates}
    {"do": "lint", "chart": ...}                                     {"answer": the linter's messages}

If the chart refuses the values, the answer is {"error": the reason}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python


def answer(request: dict[str, Any]) -> Any:
    if request["do"] == "lint":
        return helm_python.lint(request["chart"])
    with helm_python.Chart.load(request["chart"]) as chart:
        return chart.render(request["values"], name=request["release"], namespace="prod")


def main() -> None:
    for line in sys.stdin:
        try:
            reply = {"answer": answer(json.loads(line))}
        except helm_python.HelmError as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
