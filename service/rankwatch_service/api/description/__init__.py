"""What the OpenAPI description says beyond the types of the routes: refusals and examples."""
