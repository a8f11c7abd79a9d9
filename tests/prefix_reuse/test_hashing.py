"""Page keys, namespaces and the weight fingerprint."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefix_reuse.errors import InvalidRequestError
from prefix_reuse.hashing import Namespace, page_keys, weight_fingerprint

FULL = Namespace(
    model_id="m", revision="r", weights="w", tokenizer="t", dtype="bfloat16", page_size=4, num_layers=2,
    num_kv_heads=2, head_dim=8, layout="l", position_config="rope", adapter="a", tenant_salt="s",
)  # fmt: skip

SCRIPT = """
import numpy as np
from prefix_reuse.hashing import Namespace, page_keys
ns = Namespace("m", "r", "w", "t", "d", 4, 2, 2, 8, "l", "p")
tokens = list(range(1, 13))
keys = {tuple(page_keys(t, 4, ns)) for t in (tokens, np.array(tokens, np.int32), np.array(tokens, np.int64))}
assert len(keys) == 1
print([k.hex() for k in keys.pop()], Namespace("m").digest.hex())
"""


def run_with_seed(seed: str) -> tuple[str, str]:
    env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    keys, unidentified = done.stdout.strip().rsplit(" ", 1)
    return keys, unidentified


def test_keys_are_the_same_in_every_process_and_missing_identity_is_not():
    """H02, B4: keys do not depend on PYTHONHASHSEED or the integer type; a missing field is unique to the process."""
    results = [run_with_seed(seed) for seed in ("0", "1", "random")]
    assert len({keys for keys, _ in results}) == 1
    assert len({unidentified for _, unidentified in results}) == 3


@pytest.mark.parametrize("name", [f.name for f in fields(Namespace)])
def test_changing_any_field_changes_the_namespace(name):
    """B4, H03, H04, H05: every field separates, and so does leaving it out."""
    old = getattr(FULL, name)
    changed = (("k", "v"),) if name == "extra" else old + 1 if isinstance(old, int) else f"{old}x"
    digests = {FULL.digest, FULL.replace(**{name: changed}).digest}
    if name != "extra":
        digests.add(FULL.replace(**{name: None}).digest)
    assert len(digests) == (2 if name == "extra" else 3)
    assert FULL.is_portable
    assert FULL.replace(adapter=None, tenant_salt=None).is_portable
    assert not FULL.replace(weights=None).is_portable


def test_missing_identity_matches_itself_within_a_process_only_where_it_is_missing():
    """B4: None is never a wildcard."""
    assert Namespace("m").digest == Namespace("m").digest
    assert Namespace("m").digest != Namespace("m", revision="r").digest


def test_fields_cannot_run_into_each_other():
    """B4: values are length-prefixed."""
    assert Namespace("ab", "c").digest != Namespace("a", "bc").digest


def test_identity_that_is_no_field_still_separates():
    """B4: nothing that a model reports is dropped."""
    a = Namespace.from_identity({"model_id": "m", "quantisation": "q4"}, page_size=16)
    b = Namespace.from_identity({"model_id": "m", "quantisation": "q8"}, page_size=16)
    assert a.digest != b.digest
    assert a.page_size == 16


def test_a_key_depends_on_namespace_page_size_position_and_history():
    """A7: equal tokens under another history, index, namespace or page size have another key."""
    repeated = page_keys([5, 6, 7, 8] * 2, 4, FULL)
    assert len(set(repeated)) == 2
    other_parent = page_keys([1, 2, 3, 4, 5, 6, 7, 8], 4, FULL)
    assert repeated[1] != other_parent[1]
    assert page_keys([5, 6, 7, 8], 4, FULL.replace(tenant_salt="z"))[0] != repeated[0]
    assert not set(page_keys([5, 6, 7, 8] * 2, 2, FULL)) & set(repeated)


def test_every_token_is_hashed_at_most_once():
    """H36: n tokens of one prompt cost n tokens of hashing; a chain continues without hashing its beginning again."""
    fed = []

    def digest(message: bytes) -> bytes:
        fed.append(len(message))
        return message[-16:]

    tokens = np.arange(65_536, dtype=np.int32)
    keys = page_keys(tokens, 16, b"ns", digest=digest)
    assert len(keys) == 4096
    per_page = 4 * 16
    assert sum(fed) <= 4 * 65_536 + 4096 * (32 + 8)
    fed.clear()
    more = page_keys(tokens[:16], 16, b"ns", parent=keys[-1], first_page=4096, digest=digest)
    assert len(more) == 1
    assert sum(fed) <= per_page + 32 + 8


def test_continued_chain_equals_the_chain_of_the_whole():
    """H36: incremental keys are the same keys."""
    tokens = np.arange(40, dtype=np.int32)
    whole = page_keys(tokens, 4, FULL)
    assert page_keys(tokens[20:], 4, FULL, parent=whole[4], first_page=5) == whole[5:]


@pytest.mark.parametrize("bad", [[-1], [2**31], np.zeros((2, 2), np.int32), [1.5]])
def test_token_ids_outside_int32_are_refused(bad):
    """B3: ids are never wrapped or rounded into other ids."""
    with pytest.raises(InvalidRequestError):
        page_keys(bad, 1, b"ns")


def test_fingerprint_changes_with_any_element_dtype_shape_and_name():
    """B4, H05: the weight fingerprint sees every parameter."""
    params = {"a": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "b": [jnp.ones(5), jnp.zeros((), jnp.int8)]}
    base = weight_fingerprint(params)
    assert base == weight_fingerprint(jax.tree.map(lambda x: x + 0, params))
    seen = {base}
    for i in range(12):
        a = params["a"].reshape(-1).at[i].add(1).reshape(3, 4)
        seen.add(weight_fingerprint({**params, "a": a}))
    seen.add(weight_fingerprint({**params, "a": params["a"].reshape(4, 3)}))
    seen.add(weight_fingerprint({**params, "a": params["a"].astype(jnp.float32)}))
    seen.add(weight_fingerprint({**params, "a": params["a"][::-1]}))
    seen.add(weight_fingerprint({"c": params["a"], "b": params["b"]}))
    seen.add(weight_fingerprint({**params, "b": [jnp.ones(5), jnp.ones((), jnp.int8)]}))
    assert len(seen) == 18
