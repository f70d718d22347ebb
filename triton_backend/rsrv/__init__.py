"""rsrv: many compiled models on one GPU, behind Triton. Importing this costs nothing."""
