"""`rsrv gpu first-hour`: what rsrv does on a card that it has not met yet, checked and measured part by part."""
