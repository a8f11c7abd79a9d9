"""What the tests of deterministic mode share: a recorder of the bits of every token that an engine computes, anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prefix_reuse import Engine
from prefix_reuse.plan import PrefillBatch
from prefix_reuse.sequence import Sequence as Row


class Tap:
    """`model`, whose compiled steps hand out every hidden state that they unembed, and its logits: decode returns neither."""

    def __init__(self, model: Any):
        self._model = model
        self.taken: list[tuple[np.ndarray, np.ndarray]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        logits = self._model.unembed(params, hidden)
        jax.debug.callback(self._take, hidden, logits, ordered=True)
        return logits

    def _take(self, hidden: Any, logits: Any) -> None:
        self.taken.append((np.asarray(hidden), np.asarray(logits)))

    def take(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Everything since the last call."""
        jax.effects_barrier()
        taken, self.taken = self.taken, []
        return taken


class Bits:
    """The final hidden state and the logits of every text that was ever computed, as bytes; a second value is a fault.

    Engines of one model whose bits must agree are `watch`ed by one `Bits`. A text is a token with everything before it,
    whoever computed it, in prefill, in a replay or in decode. Decode programs are seen where the model is a `Tap`.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], bytes] = {}
        self.repeats = 0
        """Values that were computed again, and came out the same."""
        self.decoded = 0
        """Tokens that decode programs computed."""
        self.different: list[str] = []

    def watch(self, engine: Engine) -> Engine:
        runner = engine.runner
        run, decode = runner._run_packed, runner.decode
        texts: dict[int, np.ndarray] = {}

        def watched(batch: PrefillBatch) -> Any:
            outputs = run(batch)
            self._record(engine, batch, outputs, texts)
            return outputs

        def watched_decode(rows: Sequence[Row], num_steps: int) -> tuple[np.ndarray, int]:
            if not isinstance(engine.model, Tap) or runner._one_program:
                return decode(rows, num_steps)
            engine.model.take()
            tokens, saved = decode(rows, num_steps)
            steps = engine.model.take()
            assert len(steps) == len(tokens)
            for i, row in enumerate(rows):
                for step, (hidden, logits) in enumerate(steps):
                    if tokens[step, i] < 0:
                        break
                    text = np.concatenate([row.tokens, tokens[:step, i]]).astype(np.int32).tobytes()
                    self._add("hidden", text, hidden[i])
                    self._add("score", text, logits[i])
                    self._add("logits", text, logits[i])
                    self.decoded += 1
            return tokens, saved

        runner._run_packed = watched  # type: ignore[method-assign]
        runner.decode = watched_decode  # type: ignore[method-assign]
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
