"""Tables, engines and migrations: everything that knows the database."""
