"""The real models of bundles/examples: what exporting costs, how exact it is, and what they serve (docs/benchmark.md)."""
