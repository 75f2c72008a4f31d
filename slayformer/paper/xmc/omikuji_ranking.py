"""Rank labels by omikuji's trees of linear classifiers: a process, for the library talks a lot.

`python -m slayformer.paper.xmc.omikuji_ranking TRAIN TEST RANKED COUNT` trains on the file TRAIN
and saves the first COUNT labels of each document of TEST to RANKED, a .npy file.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np

from slayformer.paper.xmc.data import read_documents


def main(train_file: str, test_file: str, ranked_file: str, first: str) -> None:
    """Train, rank and save."""
    import omikuji

    count = int(first)
    model, test = omikuji.Model.train_on_data(train_file), read_documents(Path(test_file))
    ranked = np.zeros((len(test), count), np.int64)
    starts = test.features.starts
    for row, features in enumerate(test.features):
        weights = test.weights[starts[row] : starts[row + 1]]
        pairs = list(zip(features.tolist(), weights.tolist(), strict=True))
        found = [label for label, _ in model.predict(pairs, top_k=count)]
        # the search may end with fewer: any other labels fill up
        others = (label for label in range(test.label_count) if label not in found)
        ranked[row] = [*found, *islice(others, count - len(found))]
    np.save(ranked_file, ranked)


if __name__ == "__main__":
    main(*sys.argv[1:])
