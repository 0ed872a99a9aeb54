"""Who talks to whom: the process groups along the axes of a layout."""

import torch.distributed as dist

from slipstream.plan import Layout, Place

Group = dist.ProcessGroup


class Groups:
    """The groups of one worker. A group of one is None: there is nobody to talk to."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.place = layout, layout.place(rank)
        self._known: dict[tuple[int, ...], Group] = {}

    def ranks(self, *axes: str) -> list[int]:
        """The workers that differ from this one along these axes alone, in order."""
        places = [self.place]
        for axis in (axis for axis in Place._fields if axis in axes):
            places = [place._replace(**{axis: n}) for place in places for n in range(getattr(self.layout, axis))]
        return [self.layout.rank(place) for place in places]

    def along(self, *axes: str) -> Group | None:
        """Their group. All of them must ask for it, and all workers for their groups in the same order."""
        return self.of(self.ranks(*axes))

    def of(self, ranks: list[int]) -> Group | None:
        """The group of these workers, of which this is one."""
        if len(ranks) == 1:
            return None
        key = tuple(ranks)
        if key not in self._known:
            everyone = len(ranks) == self.layout.workers
            made = dist.group.WORLD if everyone else dist.new_group(ranks, use_local_synchronization=True)
            assert made is not None, "a process group exists: there are several workers"
            self._known[key] = made
        return self._known[key]
