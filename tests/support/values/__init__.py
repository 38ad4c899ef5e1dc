"""Values written out by hand."""
