"""`rankwatch routes`: whom incidents go to, and when."""
