"""What a front knows and decides. A front is one model in Triton: the Python stub, or the native front.

Everything here is pure, and time is an argument. `Front` (in `front`) takes events and returns instructions; `events` defines
both. `states` has the table of a model's states on one device, `outage` the limits for waiting requests, and `rules` the
limits, statuses and texts.
"""
