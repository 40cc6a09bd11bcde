"""The check that packed documents do not affect each other: one changes, the others may not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attn_dispatch_tools.verify.case import Case
from attn_dispatch_tools.verify.reference import Operands, segment_ids

_QUERY_ARRAYS = ("query", "out_grad", "out")
_KEY_ARRAYS = ("key", "value")


@dataclass(frozen=True)
class Document:
    """One document of one batch row, with the places of its queries and keys."""

    batch_row: int
    queries: np.ndarray
    """bool [T]."""
    keys: np.ndarray
    """bool [S]."""

    @staticmethod
    def of(case: Case) -> Document | None:
        """The longest document of a packed case; None if no row has two documents."""
        operands, options = case.operands(), case.forward_options()
        found = []
        for batch_row in range(case.b):
            query_ids, key_ids = segment_ids(options, operands, batch_row)
            ids = set(query_ids.tolist()) & set(key_ids.tolist()) - {0}
            if len(ids) > 1:
                found += [Document(batch_row, query_ids == x, key_ids == x) for x in sorted(ids)]
        return max(found, key=lambda x: x.queries.sum() + x.keys.sum(), default=None)

    def changed(self, operands: Operands, fill: float | None) -> Operands:
        """The arrays of a call with this document's all `fill`, or else all different ones."""
        rng = np.random.default_rng(3)
        operands = {name: np.array(x) for name, x in operands.items()}
        for names, rows in ((_QUERY_ARRAYS, self.queries), (_KEY_ARRAYS, self.keys)):
            for name in set(names) & set(operands):
                x = operands[name]
                new = rng.standard_normal(x.shape[1:]) if fill is None else np.full(1, fill)
                x[self.batch_row] = np.where(rows[:, None, None], new, x[self.batch_row])
        return operands

    def without(self, results: Operands) -> Operands:
        """Results and gradients of all other documents, with 0 in the rows of this one.

        Gradients that all documents share, such as that of a bias, are left out.
        """
        others = {}
        for name, x in results.items():
            x = np.array(x)
            if name in ("lse", "row_max"):
                x[self.batch_row][:, self.queries] = 0
            elif name in _QUERY_ARRAYS:
                x[self.batch_row, self.queries] = 0
            elif name in _KEY_ARRAYS:
                x[self.batch_row, self.keys] = 0
            else:
                continue
            others[name] = x
        return others
