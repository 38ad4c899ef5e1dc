"""Who may do what: tokens, the scopes that they grant, and the identities behind them. Knows nothing of HTTP."""
