"""The commands of `rsrv-bundle`. Only `rsrv_bundle.cli`, which parses their options, needs these modules."""
