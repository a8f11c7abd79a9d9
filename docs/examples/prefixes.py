"""A cached beginning as a value: held, forked into samples, saved to disk, and the whole cache across a restart."""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from models.testing import tiny_llama
from prefix_reuse import Engine, EngineConfig, SamplingParams

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
model = tiny_llama()  # or Engine.from_checkpoint("smollm2", config)
config = EngineConfig(page_size=16, max_context=256, enable_prefix_reuse=True, snapshot_dir=f"{folder}/cache")
engine = Engine(model, config)

document = "all prompts of this experiment begin with the same page or two of text. "
engine.generate(document, SamplingParams(max_tokens=1))  # computed once
with engine.cache.hold(document) as prefix:  # its pages are not evicted inside this block
    print(prefix)
    questions = [np.append(prefix.tokens, engine.tokenize(q)) for q in ("who?", "when?")]
    answers = engine.generate(questions, SamplingParams(max_tokens=8, temperature=1.0, n=3))
    print([(a.cached_tokens, a.computed_tokens, len(a.samples)) for a in answers])
    prefix.pin()  # evicted last, also after the block
    prefix.save(f"{folder}/document")

print(engine.cache.explain("all prompts of this experiment end here"))
print(engine.cache.save_snapshot())

# A new process would do the same: the snapshot of the same model, weights and settings is loaded, any other refused.
restarted = Engine(model, config, programs=engine.programs)
again = restarted.generate(document, SamplingParams(max_tokens=1))[0]
print(again.cached_tokens, restarted.stats().snapshot)
restarted.clear_cache()
loaded = restarted.cache.load(f"{folder}/document")
print(loaded)
