"""Makers of the example bundles. A bundle is made by the module of its name, or by the folder named after its first word.

`build.py` runs the makers. Every maker has `make(out_dir)`, which writes the bundle `out_dir`. Most of them also have
`reference(inputs)`, which computes the same answers without a bundle. Inputs and answers are numpy arrays by tensor name.
In a module, these are the tensor names that clients see. In a folder, they are the tensor names of the compiled modules.
"""
