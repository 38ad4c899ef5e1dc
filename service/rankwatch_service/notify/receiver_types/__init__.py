"""Types of receivers: for each one, a pure function from a message to a request, its limits, and what a reply means."""
