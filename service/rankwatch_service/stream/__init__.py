"""One process: reads the log, hands records to jobs, and commits what follows from them, once."""
