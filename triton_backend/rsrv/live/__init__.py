"""The live page, which shows a server or a fleet in browsers."""
