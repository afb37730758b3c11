"""JupyterLab's settings for notebooks with the explorer: none of the user's is touched."""

from cbviz.app.serve import set_nodelay

set_nodelay()
