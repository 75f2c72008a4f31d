"""Finding one token again: the paper's Memory tasks, distant_match and multihop."""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.paper.tasks.base import Task, asked_at, distinct, last_only


class Retrieval(Task):
    """A needle (token V − 1) lies among noise, and V − 2 at the end asks for it.

    As published the answer is always V − 1: nothing has to be found.
    """

    name, length, vocabulary_size = "retrieval", 64, 64

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        size, length = self.vocabulary_size, self.length
        ids_BT = torch.randint(size - 2, (samples, length), generator=draws)
        place_B1 = torch.randint(length - 2, (samples, 1), generator=draws)
        ids_BT.scatter_(1, place_B1, size - 1)
        ids_BT[:, -1] = size - 2
        return ids_BT

    def targets(self, ids_BT: Tensor) -> Tensor:
        return last_only(ids_BT, torch.full_like(ids_BT[:, 0], self.vocabulary_size - 1))


class KeyValueRecall(Task):
    """Pairs of a key and a value, a separator, and one of the keys: what was its value?"""

    name, length, vocabulary_size = "kv_recall", 22, 64

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        pairs, separator = (self.length - 2) // 2, self.vocabulary_size - 1
        keys_BN = distinct(samples, pairs, separator, draws)
        values_BN = torch.randint(separator, (samples, pairs), generator=draws)
        asked_B1 = torch.randint(pairs, (samples, 1), generator=draws)
        told = torch.stack([keys_BN, values_BN], dim=-1).flatten(1)
        between = torch.full_like(asked_B1, separator)
        return torch.cat([told, between, keys_BN.gather(1, asked_B1)], dim=1)

    def targets(self, ids_BT: Tensor) -> Tensor:
        told = ids_BT[:, :-2]
        asked_B1 = (told[:, ::2] == ids_BT[:, -1:]).long().argmax(dim=-1, keepdim=True)
        return last_only(ids_BT, told[:, 1::2].gather(1, asked_B1)[:, 0])


class FirstToken(Task):
    """The last answer is the first token."""

    name, length, vocabulary_size = "first_token", 64, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        return last_only(ids_BT, ids_BT[:, 0])


class DistantMatch(Task):
    """The answer in the middle is the first token."""

    name, length, vocabulary_size = "distant_match", 128, 32

    def targets(self, ids_BT: Tensor) -> Tensor:
        return asked_at(ids_BT, ids_BT.shape[1] // 2, ids_BT[:, 0])


class SelectiveCopy(Task):
    """The second half starts with the tokens that followed the markers of the first; the rest is 0.

    Every position is scored, so that answering 0 everywhere is right at most of them.
    """

    name, length, vocabulary_size = "selective_copy", 64, 32
    markers = 8

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        marker, free = self.vocabulary_size - 1, self.length // 2 - self.markers + 1
        ids_BT = torch.randint(marker, (samples, self.length), generator=draws)
        # a token between each marker and the next: what follows a marker is none
        places_BN = distinct(samples, self.markers, free, draws).sort(dim=-1).values
        return ids_BT.scatter(1, places_BN + torch.arange(self.markers), marker)

    def targets(self, ids_BT: Tensor) -> Tensor:
        half = self.length // 2
        # a stable sort of "no marker here" leaves the markers' places first, in their order
        no_marker = ids_BT[:, :half] != self.vocabulary_size - 1
        places_BN = no_marker.long().argsort(dim=-1, stable=True)[:, : self.markers]
        targets_BT = torch.zeros_like(ids_BT)
        targets_BT[:, half : half + self.markers] = ids_BT.gather(1, places_BN + 1)
        return targets_BT


class Multihop(Task):
    """Marker V − 2 in the first third, V − 1 in the second: which token follows the latter?

    One hop, despite its published name: the first marker tells nothing.
    """

    name, length, vocabulary_size = "multihop", 64, 32

    def tokens(self, samples: int, draws: torch.Generator) -> Tensor:
        size, third = self.vocabulary_size, self.length // 3
        ids_BT = torch.randint(size - 2, (samples, self.length), generator=draws)
        for number, marker in enumerate((size - 2, size - 1)):
            place_B1 = number * third + torch.randint(third, (samples, 1), generator=draws)
            ids_BT.scatter_(1, place_B1, marker)
        return ids_BT

    def targets(self, ids_BT: Tensor) -> Tensor:
        place_B1 = (ids_BT == self.vocabulary_size - 1).long().argmax(dim=-1, keepdim=True)
        return last_only(ids_BT, ids_BT.gather(1, place_B1 + 1)[:, 0])
