"""Bundles in, a Triton model repository out.

`sources` finds and reads bundles. `config` and `plan` decide what a repository with them holds, without side effects. `write`
brings a directory to that state. `cli` and `run` are the command rsrv-gen.
"""
