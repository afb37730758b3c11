"""The websocket between a page and its kernel, for clients that send anything.

A wrong message costs its sender the connection, nothing else.

Replaces two readers that trust a length which a client wrote:

* Voilà 0.5.13, `voila/tornado/kernel_websocket_handler.py`, `read_header_from_binary_message`: reads each
  outgoing message as the v1 protocol. To a client without a subprotocol messages go in the older format,
  whose first bytes then count as up to 2**64 offsets.
* jupyter_server 2.21.1, `services/kernels/connection/base.py`, `deserialize_msg_from_ws_v1` and
  `deserialize_binary_message`: both build as many offsets as an incoming message says.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Awaitable
from typing import Any, ClassVar

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyter_server.services.kernels.websocket import KernelWebsocketHandler
from tornado.web import HTTPError

PROTOCOL = "v1.kernel.websocket.jupyter.org"
MOST_DEPTH = 64
"""Levels of nesting in a message's JSON."""
MOST_MESSAGE_BYTES = 1 << 20
"""A page's messages are commands and prompts: the longest prompt has 100,000 characters."""
MOST_UNSENT_BYTES = 64 << 20
"""What a client that does not read may leave in the server's memory."""
MOST_SOCKETS = 4
"""Sockets of one kernel: its page's, and those of a page that reconnects."""
BYTES_A_SECOND = 4 << 20
MESSAGES_A_SECOND = 500


class Malformed(ValueError):
    """A message that breaks the protocol; says how."""


def split_v1(data: bytes) -> tuple[str, list[bytes]]:
    """Returns the channel and the parts of a message in the v1 format. Raises Malformed."""
    if not isinstance(data, bytes):
        raise Malformed("text, where the protocol has binary messages")
    count = int.from_bytes(data[:8], "little")
    start = 8 * (count + 1)
    if count < 6 or start > len(data):
        raise Malformed(f"{count} offsets in {len(data)} bytes")
    offsets = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    if offsets[0] != start or offsets[-1] != len(data) or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise Malformed("offsets that do not divide the message")
    channel, *parts = (data[a:b] for a, b in zip(offsets, offsets[1:]))
    try:
        return channel.decode("ascii"), parts
    except UnicodeDecodeError:
        raise Malformed("a channel that is not a name") from None


def read_json(part: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object in `part`.

    Raises Malformed for anything else, also for what only Python takes for JSON.
    """
    try:
        value = json.loads(part.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as e:
        raise Malformed(f"{what} is not JSON: {type(e).__name__}") from None
    if not isinstance(value, dict):
        raise Malformed(f"{what} is no object")
    check_depth(value, what)
    return value


def check_depth(value: Any, what: str) -> None:
    """Raises Malformed if `value` is nested deeper than `MOST_DEPTH`."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [
            v
            for x in level
            if isinstance(x, (dict, list))
            for v in (x.values() if isinstance(x, dict) else x)
        ]
        if not level:
            return
    raise Malformed(f"{what} is nested deeper than {MOST_DEPTH} levels")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def check_message(data: bytes, channels: Any, allowed: Any) -> tuple[str, list[bytes]]:
    """Returns channel and parts of a message that a kernel can read and may get.

    Raises Malformed. `allowed`: message types; empty: all.
    """
    channel, parts = split_v1(data)
    if channel not in channels:
        raise Malformed("a channel that is not there")
    header = read_json(parts[0], "the header")
    kind = header.get("msg_type")
    if not isinstance(kind, str) or not all(isinstance(header.get(k), str) for k in ("msg_id", "session")):
        raise Malformed("a header without type, id and session")
    if not allowed:
        return channel, parts
    if kind not in allowed:
        raise Malformed(f"a message of type {kind[:40]!r}, which a page may not send")
    if channel != "shell" and kind != "kernel_info_request":
        raise Malformed(f"{kind} on the channel {channel[:40]}")
    for part, what in zip(parts[1:3], ("the parent header", "the metadata")):
        read_json(part, what)
    content = read_json(parts[3], "the content")
    if (
        kind.startswith("comm_")
        and kind != "comm_info_request"
        and not isinstance(content.get("comm_id"), str)
    ):
        raise Malformed(f"{kind} without a comm")
    return channel, parts


def check_legacy(data: bytes) -> None:
    """Raises Malformed if a binary message in the format before v1 claims more parts than it can hold."""
    count = int.from_bytes(data[:4], "big", signed=True)
    if not 1 <= count <= len(data) // 4 - 1:
        raise Malformed(f"{count} parts in {len(data)} bytes")


class CheckedConnection(ZMQChannelsWebsocketConnection):
    """Passes a client's messages on to its kernel once they are known to be whole.

    JupyterLab's server uses it too, for any message type.
    """

    def handle_incoming_message(self, incoming_msg: Any) -> None:
        if not self.channels:
            return
        try:
            if self.subprotocol == PROTOCOL:
                channel, parts = check_message(
                    incoming_msg, self.channels, self.multi_kernel_manager.allowed_message_types
                )
                self.session.send_raw(self.channels[channel], parts)
            else:
                if isinstance(incoming_msg, bytes):
                    check_legacy(incoming_msg)
                super().handle_incoming_message(incoming_msg)
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
            struct.error,
            RecursionError,
        ) as e:
            self._end(f"{type(e).__name__}: {e}"[:200])

    def _end(self, why: str) -> None:
        self.log.warning("A page's connection was closed: it sent %s.", why)
        if self.websocket_handler is not None:
            self.websocket_handler.close(1008, "malformed message")


class PageSocket(KernelWebsocketHandler):
    """A page's socket: one protocol, bounded sizes and rates, and nothing of what the kernel ran."""

    _allowance = (float(BYTES_A_SECOND), float(MESSAGES_A_SECOND))
    _spent_at = 0.0
    _sockets: ClassVar[dict[str, set[PageSocket]]] = {}
    """The open sockets of each kernel, and those that are being opened."""

    async def get(self, kernel_id: str) -> None:
        mine = self._sockets.setdefault(kernel_id, set())
        if len(mine) >= MOST_SOCKETS:
            raise HTTPError(429, f"A page has {MOST_SOCKETS} sockets at most")
        mine.add(self)
        try:
            await super().get(kernel_id)
        finally:
            if self.ws_connection is None:
                self._forget(kernel_id)

    def _forget(self, kernel_id: str) -> None:
        mine = self._sockets.get(kernel_id, set())
        mine.discard(self)
        if not mine:
            self._sockets.pop(kernel_id, None)

    async def pre_get(self) -> None:
        if PROTOCOL not in self.request.headers.get("Sec-WebSocket-Protocol", "").replace(" ", "").split(","):
            raise HTTPError(400, f"The subprotocol {PROTOCOL} is needed")
        if self.kernel_id not in self.kernel_manager:
            raise HTTPError(404, "There is no such kernel")
        await super().pre_get()

    async def open(self, kernel_id: str) -> None:
        self.set_nodelay(True)
        await super().open(kernel_id)

    def on_message(self, ws_message: Any) -> Awaitable[None] | None:
        """Takes a message; a client that sends more than the allowance is read more slowly."""
        super().on_message(ws_message)
        now = time.monotonic()
        passed, self._spent_at = now - self._spent_at, now
        limits = (BYTES_A_SECOND, MESSAGES_A_SECOND)
        spent = (len(ws_message), 1)
        self._allowance = tuple(
            min(4.0 * m, a + passed * m) - s for a, m, s in zip(self._allowance, limits, spent)
        )  # type: ignore[assignment]
        wait = max(-a / m for a, m in zip(self._allowance, limits))
        return asyncio.sleep(wait) if wait > 0 else None

    def write_message(self, message: Any, binary: bool = False) -> Any:
        """Sends a message, unless it repeats the code that was run, or the client reads nothing."""
        if isinstance(message, bytes) and _is_execute_input(message):
            return None
        stream = getattr(self.ws_connection, "stream", None)
        if stream is not None and len(stream._write_buffer or ()) > MOST_UNSENT_BYTES:
            self.log.warning("A page's connection was closed: it read nothing.")
            stream.close()
            return None
        return super().write_message(message, binary)

    def on_close(self) -> None:
        self._forget(self.kernel_id)
        if getattr(self, "connection", None) is not None:
            super().on_close()

    @property
    def max_message_size(self) -> int:
        return MOST_MESSAGE_BYTES


def _is_execute_input(message: bytes) -> bool:
    try:
        header = json.loads(split_v1(message)[1][0])
    except (Malformed, ValueError, IndexError):
        return False
    return isinstance(header, dict) and header.get("msg_type") == "execute_input"
