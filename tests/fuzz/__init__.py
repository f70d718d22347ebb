"""Hostile input, made from seeds: bundles, modules and frames (`python -m tests.fuzz`, docs/security.md)."""
