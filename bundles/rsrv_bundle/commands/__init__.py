"""The commands of `rsrv-bundle`, one module each. `rsrv_bundle.cli` parses their options; no other module needs them."""
