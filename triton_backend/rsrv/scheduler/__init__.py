"""The scheduler: a pure state machine that decides what the device does next.

In the order of the data: `events` (what it is told and answers), `scheduler` (the machine), `queues` and
`waiting` (requests in flight), `deadlines` and `shedding` (which of them are over), `disciplines` and
`fair` (which model), `coalesce` (which of its requests, at which size), `costs` (what that takes),
`inflight` (what the device has to do), `gate` (which runs of meta models are under way), `weights` and `loads` (whose weights are there, whose come next,
who gives way; `memory` carries it out). `contract` says what it must not be told, `invariants` what is always true.
"""
