"""Usage by key and model, for Prometheus."""

from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True, eq=False)
class Usage(Collector):
    """Counts since the start."""

    #: Answers by key, model and HTTP status.
    answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    #: Tokens by key, model and `prompt` or `completion`, of models that report them.
    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def collect(self) -> list[Metric]:
        """Return the metrics, as Prometheus' library asks for them."""
        answers = CounterMetricFamily(
            "rsrv_openai_requests",
            "Answers of `rsrv openai`, by the name of the caller's key, the model and the HTTP status.",
            labels=("key", "model", "status"),
        )
        tokens = CounterMetricFamily(
            "rsrv_openai_tokens",
            "Tokens that models have reported: of prompts and texts (prompt), and of generated text (completion).",
            labels=("key", "model", "kind"),
        )
        for family, counts in ((answers, self.answers), (tokens, self.tokens)):
            for labels, count in counts.items():
                family.add_metric(labels, count)
        return [answers, tokens]

    def table(self) -> str:
        """Return the metrics as a table in Markdown."""
        lines = ["| metric{labels} | meaning |", "|---|---|"]
        for family in self.collect():
            # The library has no public name for a family's labels.
            labels = ",".join(vars(family)["_labelnames"])
            lines.append(f"| `{family.name}_total{{{labels}}}` | {family.documentation} |")
        return "\n".join(lines)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return bytes(generate_latest(registry))


if __name__ == "__main__":
    print(Usage().table())
