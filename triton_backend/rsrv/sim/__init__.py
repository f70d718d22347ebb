"""rsrv-sim: the scheduler in virtual time, over given or generated traffic."""
