"""Measurements against other people's software. Imported by no other part but the command line."""
