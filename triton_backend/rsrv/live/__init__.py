"""The live page: what watchers of a server, or of a fleet, see in their browsers."""
