"""What the tests of deterministic mode share: a recorder of the bits of every token that an engine computes, anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefix_reuse import Engine
from prefix_reuse.plan import PrefillBatch


class Bits:
    """The final hidden state and the logits of every text that was ever computed, as bytes; a second value is a fault.

    Engines of one model and one program shape `watch`ed by one `Bits` are held to each other. A text is a token with
    everything before it, whoever computed it, in prefill, in a replay or in decode.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], bytes] = {}
        self.repeats = 0
        """Values that were computed again, and came out the same."""
        self.different: list[str] = []

    def watch(self, engine: Engine) -> Engine:
        run = engine.runner._run_packed
        texts: dict[int, np.ndarray] = {}

        def watched(batch: PrefillBatch, sampling: dict[str, Any]) -> Any:
            outputs = run(batch, sampling)
            self._record(engine, batch, outputs, texts)
            return outputs

        engine.runner._run_packed = watched  # type: ignore[method-assign]
        return engine

    def _record(self, engine: Engine, batch: PrefillBatch, outputs: Any, texts: dict[int, np.ndarray]) -> None:
        rows = {row.row: row for row in engine.scheduler.running}
        hidden, logits = np.asarray(outputs.hidden), np.asarray(outputs.logits)
        scores = engine.runner.unembed(outputs.hidden)
        offsets = batch.lengths.query_offsets
        for place, table_row in enumerate(batch.rows):
            here = slice(offsets[place], offsets[place + 1])
            if here.start == here.stop:
                continue
            row = rows[int(table_row)]
            start = int(batch.positions[here.start])
            known = row.tokens
            if start > len(known) - 1:  # decoding: tokens that the row has not been given yet
                known = texts[row.id]
            text = np.concatenate([known[:start], batch.tokens[here]])
            texts[row.id] = text
            for i in range(here.start, here.stop):
                key = text[: start + 1 + i - here.start].tobytes()
                self._add("hidden", key, hidden[i])
                self._add("score", key, scores[i])
            self._add("logits", text.tobytes(), logits[place])

    def _add(self, kind: str, key: bytes, value: np.ndarray) -> None:
        assert np.isfinite(value.astype(np.float32)).all()
        if self._seen.setdefault((kind, key), value.tobytes()) == value.tobytes():
            self.repeats += 1
        else:
            self.different.append(f"{kind} of position {len(key) // 4 - 1}")
