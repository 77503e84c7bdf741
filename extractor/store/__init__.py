"""The data set on disk: shards, their manifest, and everything that reads or checks them.

Owns every file below the output folder and its byte-level format (`docs/formats/`). It knows nothing of
models, GPUs or SGLang; torch is imported only where tensors are handed out (`reader`, `layouts`).

Invariants: nothing half-written ever has a final name; a shard is done if and only if its folder has its
final name and its `shard.json` agrees with its files; a failed write is never reported as done; the same
input gives the same bytes.
"""
