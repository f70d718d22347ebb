"""Usage by key and model, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest

# Do not export the time of each counter's first use.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Usage:
    """Counts since the start."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = Counter(
            "rsrv_openai_requests",
            "Answers of `rsrv openai`, by the name of the caller's key, the model and the HTTP status.",
            ("key", "model", "status"),
            registry=self._registry,
        )
        self.tokens = Counter(
            "rsrv_openai_tokens",
            "Tokens that models have reported: of prompts and texts (prompt), and of generated text (completion).",
            ("key", "model", "kind"),
            registry=self._registry,
        )

    def table(self) -> str:
        """Return the metrics as a table in Markdown."""
        lines = ["| metric{labels} | meaning |", "|---|---|"]
        for counter in (self.answers, self.tokens):
            # The library has no public names for these attributes.
            labels = ",".join(counter._labelnames)
            lines.append(f"| `{counter._name}_total{{{labels}}}` | {counter._documentation} |")
        return "\n".join(lines)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' format."""
        return generate_latest(self._registry)


if __name__ == "__main__":
    print(Usage().table())
