"""Serving on one machine: a tritonserver with all devices, installed, started with the right flags, and supervised."""
