"""`rsrv serve`: serves bundles on one machine. It starts a tritonserver with the right flags, and supervises it."""
