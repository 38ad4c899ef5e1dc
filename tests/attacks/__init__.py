"""Attacks on a running service, as somebody who reaches its port or holds a token would try them."""
