"""The native front: a library that Triton loads, in C; native.h has the map. tools/native_front.py builds it."""

from pathlib import Path

#: the library, if this installation has it
LIBRARY = Path(__file__).with_name("libtriton_rsrv.so")
#: Name of a link to the library in the directory of a model that Triton batches. Triton loads it as the model's batching
#: strategy, which is guard.c.
GUARD = "batchstrategy.so"
