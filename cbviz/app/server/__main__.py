"""`python -m cbviz.app.server NOTEBOOK` serves it; `cbviz.app.serve` writes the command."""

from cbviz.app.server.main import ExplorerServer

ExplorerServer.launch_instance()
