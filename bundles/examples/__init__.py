"""Makers of the example bundles. Each bundle has a module, or shares a folder named by the first word of its name.

`build.py` runs the makers. Every maker has `make(out_dir)`, which writes the bundle `out_dir`. Most of them also have
`reference(inputs)`, which computes the same answers without a bundle. Inputs and answers are numpy arrays by tensor name.
Makers of bundles use the names that clients see. Makers in folders use the names of the compiled modules.
"""
