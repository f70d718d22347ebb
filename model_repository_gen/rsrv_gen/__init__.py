"""Generator that turns bundles into a Triton model repository.

`sources` finds and reads bundles. `config` and `plan` compute the contents of the repository, without side effects. `write`
changes a directory to these contents. `cli` and `run` are the command rsrv-gen.
"""
