"""What people read: the text of a message, and why a receiver was sent it or not. Pure."""
