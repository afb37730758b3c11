"""Other programs' formats: what goes out (Perfetto, CSV) and what comes in."""
