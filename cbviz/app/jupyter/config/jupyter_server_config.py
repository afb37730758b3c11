"""JupyterLab's settings for notebooks with the explorer: none of the user's is touched."""

from cbviz.app.serve import check_messages, set_nodelay

check_messages(c)  # type: ignore[name-defined]  # noqa: F821  # the server puts `c` into this file
set_nodelay()
