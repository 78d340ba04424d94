"""One reader for each kind of recording; `mrv2.trace.load` picks by content."""
