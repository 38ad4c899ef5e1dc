"""Small bugs written down, each with the tests that must catch it: `python -m tests.mutations`."""
