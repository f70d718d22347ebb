"""The plane that an HAProxy carries: its configuration, its maps, its admin socket, and the process.

HAProxy takes the inference requests that it can read and whose model has a worker. All else goes to the plane behind it,
the gateway's own: other calls, streams, models that nobody serves, and whatever looks unusual.
"""
