"""One machine: a tritonserver per device, and the gateway in front of them, supervised."""
