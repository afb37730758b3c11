"""`python -m cbviz` is `cbviz`."""

from cbviz.cli import main

main()
