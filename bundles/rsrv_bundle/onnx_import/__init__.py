"""Importer of ONNX models: a file is read into plain Python (`model`), and its graph is evaluated with jax (`evaluate`).

The lowerings of the operators are in `ops_*`, registered in `operators.OPERATORS`.
"""
