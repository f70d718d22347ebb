"""Makers of the example bundles, one module each; `build.py` runs them.

Every maker has `make(out_dir)`, which writes the bundle `out_dir`, and, but for a meta model's, `reference(inputs)`,
which computes the same answers without a bundle. Inputs and answers are mappings from client tensor names to numpy arrays.
"""
