"""The log: the ordered, durable record of everything that decides."""
