"""What tests and benchmarks measure rankwatch with (README.md). It is not part of the installed package."""
