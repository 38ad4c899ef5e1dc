"""Commands and the orders that carry them out on every rank of a job: hold, do, go."""
