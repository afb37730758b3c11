"""The explorer's server: Voilà with a guard in front, run as a process of its own by `cbviz.app.serve`."""
