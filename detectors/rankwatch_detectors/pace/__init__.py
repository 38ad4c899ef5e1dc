"""How long steps take: slow ranks, slow stages, a slow job."""
