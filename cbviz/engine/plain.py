"""An engine's snapshot as plain data: its digest, and what it would be without a request."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

from cbviz.core.plain import DIGEST_FORM
from cbviz.core.plain import plain_digest as control_digest
from cbviz.messages import RequestSpec, sequence_ids


def plain_digest(snapshot: dict[str, Any], form: int = DIGEST_FORM) -> str:
    """The digest of an engine's snapshot."""
    rest = msgspec.json.encode([snapshot["pending"], snapshot["idle"]])
    return sha256(control_digest(snapshot["scheduler"], form).encode() + rest).hexdigest()


def without_pending(snapshot: dict[str, Any], spec: RequestSpec) -> dict[str, Any]:
    """The snapshot of an engine to which the request will never arrive: as after `Engine.discard`."""
    gone = set(sequence_ids(spec))
    return {
        **snapshot,
        "pending": [i for i in snapshot["pending"] if i != spec.request_id],
        "known": [i for i in snapshot["known"] if i not in gone],
    }
