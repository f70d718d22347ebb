"""The scheduler: a pure state machine that decides what the device does next.

In the order of the data: `events` (what it is told and answers), `scheduler` (the machine), `queues` and
`waiting` (requests in flight), `disciplines` (which model), `coalesce` (which of its requests, at which
size), `costs` (what that takes), `weights` (whose weights are on the device). `invariants` says what is
always true.
"""
