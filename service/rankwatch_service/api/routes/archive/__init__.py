"""What can be taken away whole."""
