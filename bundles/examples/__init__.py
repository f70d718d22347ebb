"""Makers of the example bundles: a module each, or a folder for those that share its name's word; `build.py` runs them.

Every maker has `make(out_dir)`, which writes the bundle `out_dir`, and, but for a meta model's, `reference(inputs)`,
which computes the same answers without a bundle. Inputs and answers are mappings from tensor names, as clients see them or, in the
folders, as the compiled modules do, to numpy arrays.
"""
