"""What commands show of a resource, where that is more than a table."""
