"""Routes incidents to receivers as Alertmanager does: a tree of routes, groups, inhibition, times. Pure."""
