"""The protocol between a stub and the runtime: frames, sockets, shared memory. See docs/protocol.md."""
