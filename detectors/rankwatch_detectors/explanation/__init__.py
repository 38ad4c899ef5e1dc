"""Why a finding was reported, why not earlier, and what would be found today."""
