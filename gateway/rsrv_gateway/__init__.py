"""One endpoint in front of several tritonservers: passes requests through, and packs models onto devices."""
