"""The ring: every worker sends to the next. Each element travels least, in the most steps.

The tensor is cut into as many parts as there are workers. A part goes once around and each worker adds its own to it;
then the sum goes around again and each keeps it (Patarasuk and Yuan 2009). Parts travel in segments: a worker passes
one on while it receives the next.
"""

import torch
from torch import Tensor

from slipstream.train.exchange.adding.links import Links, segments, wait_for


def ring(flat: Tensor, links: Links) -> None:
    """2(p − 1) steps; 2(p − 1)/p of the tensor over each link."""
    size, following, before = links.size, (links.rank + 1) % links.size, (links.rank - 1) % links.size
    parts = torch.tensor_split(flat, size)
    # A sum may be received where the worker's own part still stands: it cannot come before that part was sent.
    places = [(links.rank - step - 1) % size for step in range(2 * size - 2)]
    received = [links.room(parts[place]) for place in places[: size - 1]]
    into = [segments(part) for part in (*received, *(parts[place] for place in places[size - 1 :]))]
    arriving = [[links.receive(segment, before) for segment in each] for each in into]
    sent = [links.send(segment, following) for segment in segments(parts[links.rank])]
    for step, place in enumerate(places):
        for work, other, own in zip(arriving[step], into[step], segments(parts[place]), strict=True):
            work.wait()
            if step < size - 1:
                own.add_(other)
            if step < len(places) - 1:
                sent.append(links.send(own, following))
    wait_for(sent)
