"""Which kernels run, for whom, and how many.

Each page has a kernel; a page that has gone gives its kernel back.
"""

from __future__ import annotations

import time
from typing import Any

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_core.utils import ensure_async
from jupyter_server import CallContext
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.web import HTTPError
from traitlets import Integer

BROWSER_HEADER = "X-Cbviz-Browser"
"""The guard writes this header into each request of a page; Voilà hands it to the kernel as
HTTP_X_CBVIZ_BROWSER.
"""
_FROM_HEADER = "HTTP_X_CBVIZ_BROWSER"
RETRY_AFTER_S = 60
PAGE_MESSAGES = ("comm_open", "comm_close", "comm_msg", "comm_info_request", "kernel_info_request")
"""What a page may send to its kernel. None of them runs code that the page brings."""


class Full(HTTPError):
    """As many pages are open as the server allows."""

    def __init__(self, most: int) -> None:
        super().__init__(503, f"{most} pages are open, as many as this server allows (--max-pages)")
        self.most = most


class PageKernels(AsyncMappingKernelManager):
    """The kernels of one server: at most `max_pages`, each known by the browser that it was started for."""

    max_pages = Integer(0, config=True, help="The most kernels at a time; 0: no limit.")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.allowed_message_types = list(PAGE_MESSAGES)
        self._starting = 0
        self._browsers: dict[str, str] = {}
        self._alone_since: dict[str, float] = {}
        self._in_making: set[str] = set()
        """Kernels whose page is still being made: they run the notebook, and no socket can be open yet."""

    def owner(self, kernel_id: str) -> str | None:
        """The hash of the browser whose page `kernel_id` belongs to."""
        return self._browsers.get(kernel_id)

    @property
    def full(self) -> bool:
        return 0 < self.max_pages <= len(self._kernels) + self._starting

    async def start_kernel(self, *, env: dict[str, str] | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        """Starts a page's kernel. Raises Full before anything is started."""
        if self.full:
            raise Full(self.max_pages)
        env = dict(env or {})
        browser = env.pop(_FROM_HEADER, "")
        self._starting += 1
        try:
            kernel_id = await super()._async_start_kernel(env={**env, "CBVIZ_BROWSER": browser}, **kwargs)
        except NoSuchKernel as e:
            raise HTTPError(500, f"There is no kernel named {e.name}") from e
        finally:
            self._starting -= 1
        self._browsers[kernel_id] = browser
        self._alone_since[kernel_id] = time.monotonic()
        page = CallContext.get(CallContext.JUPYTER_HANDLER)
        if page is not None:
            page.kernel_id = kernel_id
            self._in_making.add(kernel_id)
            if page.left:
                await self.give_back(kernel_id)
                raise HTTPError(499, reason="The visitor left")
        return kernel_id

    def page_is_made(self, kernel_id: str) -> None:
        """Counts the time without a page from now on: the page is whole, and will open its socket."""
        self._in_making.discard(kernel_id)
        if kernel_id in self._alone_since:
            self._alone_since[kernel_id] = time.monotonic()

    def notify_disconnect(self, kernel_id: str) -> None:
        super().notify_disconnect(kernel_id)
        self._alone_since[kernel_id] = time.monotonic()

    def remove_kernel(self, kernel_id: str) -> Any:
        self._browsers.pop(kernel_id, None)
        self._alone_since.pop(kernel_id, None)
        self._in_making.discard(kernel_id)
        return super().remove_kernel(kernel_id)

    async def cull_kernel_if_idle(self, kernel_id: str) -> None:
        """Ends a kernel whose page has been gone for `cull_idle_timeout`, even one that is busy: nobody waits
        for it.

        A page that is being made is not gone. If its visitor leaves, the page's handler gives the kernel
        back.
        """
        if self._kernel_connections.get(kernel_id, 0) > 0 or kernel_id in self._in_making:
            return
        since = self._alone_since.setdefault(
            kernel_id, time.monotonic()
        )  # one that is starting is not known yet
        if time.monotonic() - since > self.cull_idle_timeout:
            await self.give_back(kernel_id)

    async def give_back(self, kernel_id: str) -> None:
        """Ends a kernel; does nothing if it is gone already."""
        if kernel_id in self._kernels:
            await ensure_async(self.shutdown_kernel(kernel_id, now=True))
