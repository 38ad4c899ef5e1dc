"""`python -m rankwatch_service ROLE` is `rankwatch ROLE`."""

from rankwatch_service.cli import main

main()
