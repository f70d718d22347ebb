"""The native front, a library in C that Triton loads. native.h lists its parts. tools/native_front.py builds it."""

from pathlib import Path

#: Path of the library. An installation may lack it.
LIBRARY = Path(__file__).with_name("libtriton_rsrv.so")
#: Name of a link to the library in the directory of a model that Triton batches. Triton loads it as the model's batching
#: strategy, which is guard.c.
GUARD = "batchstrategy.so"
