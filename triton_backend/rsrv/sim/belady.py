"""The most requests that can find their weights, if all that will be asked for is known.

On a miss, the model whose next request is the furthest in the future gives way (MIN; L. Belady: A Study of Replacement
Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5, 1966).

What it bounds: the hits of any policy over the same requests, with models of equal size and room for a number of
them, that loads a model when it is asked for and not there, at once, before the next request comes, and loads
nothing else. Its misses are also the fewest loads with which requests can be served one by one in their order,
even if others may be loaded ahead of time.

What it does not bound:

- The scheduler, in either direction. A load takes time, and whoever asks during it finds no weights, though nobody
  else has to be evicted: that is a hit here. And a load waits for the link, and for whoever must not give way: until
  then the old weights stay, and requests for them are hits that nobody who loads at once could have. So where the link
  has little to do the bound holds but for a few requests, and where many wait for it the scheduler may have more.
- Loads of the scheduler. It serves several requests that wait for one model with one load, in whatever order it
  likes, and so may need fewer.
- Models of different sizes. To evict the furthest is then not the best that can be done; what is, is NP-hard to find
  (M. Chrobak, G. Woeginger, K. Makino, H. Xu: Caching Is Hard - Even in the Fault Model, Algorithmica 63, 2012).
- Seconds. With different load times, the fewest misses are not the shortest wait.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush


def most_hits(requests: Sequence[str], room: int, resident: Iterable[str] = ()) -> int:
    """Of requests for these models in this order, how many can find their weights, at most.

    `room` is for how many models there is room, `resident` are those that are there at first. Costs O(n log n).

    Raises:
        ValueError: there is no room for one model, or not for the resident ones.
    """
    there = set(resident)
    if room < max(1, len(there)):
        raise ValueError(f"room must be for at least {max(1, len(there))} models, not {room}")
    never = len(requests)
    #: request -> the next one for the same model; in the end, model -> the first one for it.
    following = [never] * len(requests)
    first: dict[str, int] = {}
    for index in range(len(requests) - 1, -1, -1):
        following[index] = first.get(requests[index], never)
        first[requests[index]] = index
    # The furthest first. An entry is stale once its request has come: a later one of its model is there.
    furthest = [(-first.get(name, never), name) for name in there]
    heapify(furthest)
    hits = 0
    for index, name in enumerate(requests):
        if name in there:
            hits += 1
        elif len(there) == room:
            # A stale entry lies in the past, so it is never above one of a model that is there.
            there.remove(heappop(furthest)[1])
        there.add(name)
        heappush(furthest, (-following[index], name))
    return hits
