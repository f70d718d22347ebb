"""rsrv-sim: the scheduler in virtual time, with given or generated traffic."""
