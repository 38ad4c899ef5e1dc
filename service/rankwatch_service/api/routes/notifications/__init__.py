"""What became of notifications: their list, the tries to deliver them, and those that people send."""
