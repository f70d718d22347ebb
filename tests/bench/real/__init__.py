"""The real models of bundles/examples: export time, exactness and serving rate (docs/benchmark.md)."""
