"""What the commands of `rsrv-bundle` do. `rsrv_bundle.cli` reads their options; nothing else of the package needs these."""
