"""Attempts of one job: which runs and which wait, who carries the ranks, and how much state they may have. Pure."""
