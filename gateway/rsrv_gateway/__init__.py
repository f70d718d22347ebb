"""Gateway: one endpoint in front of several tritonservers. It forwards requests and packs models onto devices."""
