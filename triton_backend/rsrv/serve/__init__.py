"""Serving on one machine: the tritonserver that `rsrv serve` starts, and how it is installed."""
