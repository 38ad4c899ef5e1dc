"""Rules that people write about metrics of their jobs: their form, their rows, and their preview."""
