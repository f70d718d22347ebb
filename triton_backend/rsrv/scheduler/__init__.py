"""The scheduler: a pure state machine that decides what the device does next.

In reading order:

- the machine: `events` (events and instructions), `settings`, `scheduler` (handles events and answers questions);
- one model: `model` (its state), `variant_queue` (its waiting requests), `batching` (which of them share an execution, at
  which compiled size and cost), `history` (its latest records), `statistics` (counters and snapshots);
- all requests: `request_queue` (how they enter and leave), `inflight` (executions on the device), `meta_admission`
  (runs of meta models);
- the next execution: `discipline` (the protocol), `disciplines`, `fair`, `ranking` (the index);
- weights on the device: `weight_states` (the table of their states), `weights` (the accounts of their bytes), `load_queue`
  (which weights load next), `eviction` (which weights are evicted), `residency` (carries out loads and evictions);
- `invariants`: checks that tests run after every event.
"""
