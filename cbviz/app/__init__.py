"""The explorer: the widget, its run loop, and the servers that show it.

The only place with anywidget, plotly and IPython.
"""
