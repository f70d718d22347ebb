"""The scheduler: a pure state machine that decides what the device does next.

In reading order:

- the machine: `events` (what it is told, and what it answers), `settings`, `scheduler` (how an event is handled);
- one model: `model` (its state), `variant_queue` (its requests that wait), `batching` (which of them share an execution,
  at which compiled size, and what it costs), `history` (its latest records), `statistics` (counts and snapshots);
- all requests: `request_queue` (how they enter and leave), `inflight` (executions on the device), `meta_admission`
  (runs of meta models);
- which model executes next: `discipline` (the protocol), `disciplines`, `fair`, `ranking` (the index);
- which weights are on the device: `weights` (where they are), `loads` (which come next), `eviction` (which are evicted),
  `memory` (carries both out);
- `invariants`: what is true after every event.
"""
