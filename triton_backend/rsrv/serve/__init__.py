"""Serving on one machine: tritonserver installed, started with the right flags, and supervised.

One tritonserver per device, and with several of them the gateway in front.
"""
