"""`rsrv gpu check`: check and measure rsrv on a new card, part by part."""
