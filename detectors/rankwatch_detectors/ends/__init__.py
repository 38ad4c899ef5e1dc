"""How processes, hosts and attempts end."""
