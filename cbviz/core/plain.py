"""The control plane's fields, each declared once, and the digest that is made from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from cbviz.config import EngineConfig
from cbviz.core import expert_use, request
from cbviz.core.fields import Field, to_plain
from cbviz.core.kv.runs import ids_of
from cbviz.core.request import Request

INIT_NEW_TOKEN_RATIO = 0.7
"""SGLang's default; see `core.estimate`."""
DIGEST_FORM = 2
"""What a digest covers.

Form 1 (recorded by earlier versions) leaves out the order of the requests, on which the order of time-outs
depends.
"""


def _ids(requests: Iterable[Request]) -> list[str]:
    return [r.request_id for r in requests]


def _plain_requests(requests: dict[str, Request]) -> dict[str, Any]:
    return {r.request_id: to_plain(r, request.FIELDS) for r in requests.values()}


FIELDS = (
    Field("config", undo=True, write=EngineConfig.to_dict, restore=False),
    Field("rules", undo=True, snapshot=False),
    Field("policy", undo=True, snapshot=False),
    Field("ranked_by", undo=True, snapshot=False),
    Field("session_ranks", undo=True, snapshot=False),
    Field("proposer", undo=True, snapshot=False),
    Field("num_lookahead", undo=True, snapshot=False),
    Field("drafting", undo=True, snapshot=False),
    Field("step", undo=True),
    Field("num_arrived"),
    Field("num_finished"),
    Field("finished_ids", undo=True, write=list, read=list),
    Field("batch_open", undo=True, carried_from=False),
    Field("new_token_ratio", undo=True, carried_from=INIT_NEW_TOKEN_RATIO),
    Field("served", write=dict, read=dict),
    Field("routed", write=expert_use.copy, read=expert_use.copy, older={}, sparse=True),
    Field("requests", write=_plain_requests, restore=False),
    Field("waiting", write=_ids, restore=False),
    Field("running", write=_ids, restore=False),
)
"""Every attribute of `ControlState` that changes, but for caches and the block pools, which keep their own."""
_UNHASHED = frozenset(f.name for f in request.FIELDS if not f.digest)


def plain_digest(snapshot: dict[str, Any], form: int = DIGEST_FORM) -> str:
    """The digest of a state's snapshot."""
    plain = {**snapshot, "pool": dict(snapshot["pool"])}
    for short, where, whole in (("free_runs", plain["pool"], "free"), ("host_free_runs", plain, "host_free")):
        if short in where:  # a digest covers the free lists one by one
            where[whole] = list(ids_of(where.pop(short)))
    plain["requests"] = {
        rid: {name: value for name, value in d.items() if name not in _UNHASHED}
        for rid, d in snapshot["requests"].items()
    }
    if form > 1:
        plain["order"] = list(plain["requests"])
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
