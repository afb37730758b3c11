"""`explorer()`: the whole explorer as one widget.

Binds the page to a Player; owns neither the run nor the picture.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anywidget
import traitlets

from cbviz.app import assets, light, opening
from cbviz.app.allowed import Allowed
from cbviz.app.alternative import Alternative, wanted
from cbviz.app.later import later
from cbviz.app.opening import Settings
from cbviz.app.player import Player
from cbviz.session import Session
from cbviz.trace import Trace


class Explorer(anywidget.AnyWidget):
    """The explorer's page. `player` is its run loop, `session` what it shows."""

    _esm = assets.LOADER
    _css = assets.css()
    app_js = traitlets.Unicode("").tag(sync=True)
    plotly_gz = traitlets.Bytes(b"").tag(sync=True)
    alternative = traitlets.Unicode("").tag(sync=True)
    """Name of what a notebook keeps for places without a kernel; '' where nothing is kept."""

    def __init__(self, player: Player | None = None) -> None:
        self._kept = Alternative(self._trace, self._still) if wanted() else None
        self._watching: asyncio.Task[None] | None = None
        super().__init__(
            app_js=assets.app_js(),
            plotly_gz=assets.plotly_gz(),
            alternative=self._kept.id if self._kept is not None else "",
        )
        self.player = player

    @property
    def session(self) -> Any:
        """The session that is shown; None while it is being opened."""
        return self.player.session if self.player is not None else None

    def _trace(self) -> Trace | None:
        session = self.session
        return session.trace if session is not None else None

    def _still(self) -> AbstractContextManager[Any]:
        """Holds back the engine's next step."""
        session = self.session
        return session.turn if isinstance(session, Session) else nullcontext()

    def _resting(self) -> bool:
        """The run stands still, so that a moment's work disturbs nobody."""
        return self.player is not None and not self.player.playing and not self.player.busy

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None or self._kept is None:
            return bundle
        self._kept.show()
        if self._watching is None and self.player is not None:
            self._watching = self.player.loop.create_task(self._kept.watch(self._resting))
        data, metadata = bundle
        return {**data, "text/plain": "The cbviz explorer. Run this cell to use it."}, metadata

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._kept is not None:
            self._kept.hide()
        if self.player is not None:
            self.player.close()
        super().close()


def explorer(
    session: Session | Trace | None = None,
    *,
    scenario: str | None = None,
    model: str | None = None,
    **config: Any,
) -> Explorer:
    """The explorer of `session`; of a recording, if it is given a Trace; without one, of a new session.

    `scenario`: a preset, a file of requests, or '' for an empty start. `model`: a model's name, `sim`, or
    `tape` (recorded tokens); without one, the real model if this machine has room for it (`light.reason`).
    Other keywords are fields of EngineConfig. In a Voilà page the address may set them too:
    `?scenario=burst&model=sim&seed=3`. Raises ConfigError.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "the explorer needs a notebook's event loop: call it in JupyterLab or Voilà (cbviz lab, cbviz "
            "explore)"
        ) from None
    query = os.environ.get("QUERY_STRING", "")
    in_voila = "voila" in os.environ.get("SERVER_SOFTWARE", "").lower()
    wanted = scenario if scenario is not None else os.environ.get("CBVIZ_SCENARIO", opening.DEFAULT_SCENARIO)
    named = model or os.environ.get("CBVIZ_MODEL")
    lacking = light.reason() if named is None and session is None else ""
    settings = Settings(wanted, named or (opening.TAPE if lacking else "smollm2"), dict(config))
    settings = settings.playable() if lacking else settings
    alone = not in_voila or os.environ.get("CBVIZ_ALONE") == "1"
    host = settings
    place: dict[str, str] = {}
    shown: Any = session
    problems: list[str] = []
    if isinstance(session, Trace):
        shown = opening.Recording(session, "it was opened from a file")
    elif session is None and query:
        settings, place, problems = Allowed(host, alone).link(query)
    widget = Explorer()
    step = int(place["step"]) if "step" in place else None
    main = threading.get_ident()

    def send(message: dict[str, Any], buffers: list[bytes]) -> None:
        if threading.get_ident() == main:
            widget.send(message, buffers)
        else:
            later(loop, widget.send, message, buffers)

    player = Player(
        send,
        settings,
        session=shown,
        run=place.get("run"),
        at_step=step,
        address=in_voila and session is None,
        allow_code=in_voila and os.environ.get("CBVIZ_ALLOW_CODE") == "1",
        note=f"Light mode, without the real model: {lacking}." if lacking else "",
        loop=loop,
        browser=os.environ.get("CBVIZ_BROWSER", ""),
        alone=alone,
        host=host,
    )
    widget.player = player
    if problems:
        player.notice(
            "\n".join(["These parts of the address are wrong and were ignored:", *problems]), bad=True
        )
    widget.on_msg(lambda _, message, buffers: player.receive(message))
    return widget
